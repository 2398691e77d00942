"""The decay gate of Kimi Delta Attention: projected logits to log-decays.

The two forms are different functions, not one function and its clamp: K3 has the bounded one (K3 report Eq. 5), Kimi
Linear the unbounded one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def kda_gate(
    z: Float[Array, "B T H K"],
    A_log: Float[Array, "H"],
    dt_bias: Float[Array, "H K"],
    lower_bound: float | None,
) -> Float[Array, "B T H K"]:
    """Log-decay g (natural logarithm, <= 0) of every key channel, float32 whatever the type of z.

    With y = z + dt_bias and the per-head rate a = exp(A_log):
        lower_bound a float   g = lower_bound * sigmoid(a * y)      (K3 report Eq. 5; K3 uses -5)
        lower_bound None      g = -a * softplus(y)                  (Kimi Linear; unbounded below)

    Padding must be applied to g, not to z: z = 0 decays the state in both forms.
    Raises ValueError where lower_bound is not negative or a shape does not fit.
    """
    heads, channels = z.shape[-2:]
    if A_log.shape != (heads,):
        raise ValueError(f"A_log.shape = {A_log.shape}: expected {(heads,)}, one rate per head of z {z.shape}")
    if dt_bias.shape != (heads, channels):
        raise ValueError(f"dt_bias.shape = {dt_bias.shape}: expected {(heads, channels)} for z {z.shape}")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound = {lower_bound}: expected a negative number or None")

    rate = jnp.exp(A_log.astype(jnp.float32))[None, None, :, None]
    logits = z.astype(jnp.float32) + dt_bias.astype(jnp.float32)[None, None]
    if lower_bound is None:
        return -rate * jax.nn.softplus(logits)
    # sigmoid's derivative is formed as s * (1 - s) before it meets the rate, so a saturated gate gives 0, not 0 * inf.
    return lower_bound * jax.nn.sigmoid(rate * logits)
