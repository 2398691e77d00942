"""Kimi K3 in JAX/Flax for TPU pods."""

from k3_jax.config import K3Config
from k3_jax.nn.transformer import K3

__all__ = ["K3", "K3Config"]
