"""Kernels of Kimi K3, one folder per operation. Imports jax only, never k3_jax."""
