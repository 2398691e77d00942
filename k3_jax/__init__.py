"""Kimi K3 in JAX/Flax for TPU pods."""

from typing import TYPE_CHECKING

from k3_jax.config import K3Config

if TYPE_CHECKING:
    from k3_jax.nn.transformer import K3

__all__ = ["K3", "K3Config"]


def __getattr__(name: str):
    """`K3` on first use: `k3 --help` must not wait seconds for JAX and Flax."""
    if name == "K3":
        from k3_jax.nn.transformer import K3

        return K3
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
