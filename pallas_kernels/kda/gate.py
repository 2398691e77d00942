"""The decay gate of Kimi Delta Attention: projected logits to log-decays.

The two forms are different functions, not one function and its clamp: K3 has the bounded one (K3 report Eq. 5), Kimi
Linear the unbounded one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Below this log-decay a channel keeps 1e-13 of its state: zero in float32. The floor keeps the sums of g finite
# whatever a gate does: they are matrix products with zeros and ones, and 0 * inf is NaN.
GATE_FLOOR = -30.0


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
    check_gate(z, A_log, dt_bias, lower_bound)
    rate = jnp.exp(A_log.astype(jnp.float32))[None, None, :, None]
    return activate(z.astype(jnp.float32), rate, dt_bias.astype(jnp.float32)[None, None], lower_bound)


def check_gate(z, A_log, dt_bias, lower_bound) -> None:
    """Raises ValueError naming the argument."""
    heads, channels = z.shape[-2:]
    if A_log.shape != (heads,):
        raise ValueError(f"A_log.shape = {A_log.shape}: expected {(heads,)}, one rate per head of z {z.shape}")
    if dt_bias.shape != (heads, channels):
        raise ValueError(f"dt_bias.shape = {dt_bias.shape}: expected {(heads, channels)} for z {z.shape}")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound = {lower_bound}: expected a negative number or None")


def activate(
    z: Float[Array, "*S"], rate: Float[Array, "*R"], bias: Float[Array, "*S2"], lower_bound: float | None
) -> Float[Array, "*S"]:
    """The log-decay of float32 logits, element by element; `rate` = exp(A_log)."""
    if lower_bound is None:
        return -rate * jax.nn.softplus(z + bias)
    # sigmoid's derivative is formed as s * (1 - s) before it meets the rate, so a saturated gate gives 0, not 0 * inf.
    return lower_bound * jax.nn.sigmoid(rate * (z + bias))


def activation_gradients(
    z: Float[Array, "C K"], rate: Float[Array, "1 K"], bias: Float[Array, "1 K"], lower_bound: float | None,
    dg: Float[Array, "C K"],
) -> tuple[Float[Array, "C K"], Float[Array, "1 K"], Float[Array, "1 K"]]:  # fmt: skip
    """Of z (and, summed over the rows, of the bias) and of the rate."""
    x = z + bias
    if lower_bound is None:
        dz, drate = -rate * jax.nn.sigmoid(x) * dg, -jax.nn.softplus(x) * dg
    else:
        s = jax.nn.sigmoid(rate * x)
        r = lower_bound * (s * (1.0 - s)) * dg
        dz, drate = r * rate, r * x
    return dz, jnp.sum(drate, axis=0, keepdims=True), jnp.sum(dz, axis=0, keepdims=True)
