"""Root-mean-square and L2 norms: float32 statistics; each function states where it rounds."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*r D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*r D"]:
    """x / rms(x) rounded to x's dtype, then times the weight: the released model's order."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return jnp.expand_dims(weight.astype(x.dtype), range(x.ndim - 1)) * normed.astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*r V"], gate: Float[Array, "*r V"], weight: Float[Array, " V"], eps: float
) -> Float[Array, "*r V"]:
    """rms_norm(x) * sigmoid(gate), all in float32 and rounded once to the gate's dtype (report Eq. 6)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    scaled = normed * jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    return (scaled * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)


def l2_norm(x: Float[Array, "*r K"], eps: float = 1e-6) -> Float[Array, "*r K"]:
    """x / sqrt(sum(x^2) + eps): the epsilon stands inside the root, on the sum."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)
