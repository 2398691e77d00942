"""kda_gate, in both of its forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.testing import assert_close, assert_gradients_close, outputs_and_gradients
from pallas_kernels.kda import kda_gate

BOUNDS = pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "unbounded"])


def oracle(z, A_log, dt_bias, dg, bound):
    """Value and gradients in float64; with s = sigmoid(y), softplus has the derivative s and s itself s (1 - s)."""
    z, A_log, dt_bias, dg = (x.astype(np.float64) for x in (z, A_log, dt_bias, dg))
    rate, logits = np.exp(A_log)[:, None], z + dt_bias
    if bound is None:
        g = -rate * np.logaddexp(0, logits)
        dz, dA_log = -rate * dg / (1 + np.exp(-logits)), dg * g
    else:
        s = 1 / (1 + np.exp(-rate * logits))
        g = bound * s
        dz = bound * s * (1 - s) * rate * dg
        dA_log = dz * logits
    return g, {"z": dz, "A_log": dA_log.sum((0, 1, 3)), "dt_bias": dz.sum((0, 1))}


def gate(bound):
    def function(z, A_log, dt_bias):
        return (kda_gate(z, A_log, dt_bias, bound),)

    return function


@BOUNDS
@pytest.mark.parametrize("shape", [(1, 2, 2, 12), (2, 65, 3, 60), (4, 128, 8, 128)], ids=str)
def test_values_and_gradients(shape, bound):
    """Logits of ten times the usual size, where most of the gate is saturated."""
    random = np.random.default_rng(0)
    z, dt_bias, A_log, dg = (random.standard_normal(x, np.float32) for x in (shape, shape[2:], shape[2:3], shape))
    arguments = {"z": 10 * z, "A_log": A_log, "dt_bias": 10 * dt_bias}
    (g,), gradients = outputs_and_gradients(gate(bound), arguments, (dg,))
    expected, expected_gradients = oracle(**arguments, dg=dg, bound=bound)
    assert_close("g", g, expected, 1e-6)
    assert_gradients_close(gradients, expected_gradients, 1e-5)


@pytest.mark.parametrize(
    ("A_log", "z", "expected"),
    [(0.0, 0.0, -2.5), (np.log(16), 1.0, -4.99999944), (0.0, -3.0, -0.2371294), (0.0, 6.0, -4.987637)],
)
def test_the_bounded_gate_is_a_sigmoid_and_not_a_clamp(A_log, z, expected):
    def gate(z):
        return kda_gate(z, jnp.full(1, A_log, jnp.float32), jnp.zeros((1, 1)), -5.0)

    z = jnp.full((1, 1, 1, 1), z)
    np.testing.assert_allclose(gate(z), expected, rtol=1e-6)
    assert gate(z).min() > -5 and jax.grad(lambda z: gate(z).sum())(z).max() < 0


@BOUNDS
def test_gradients_are_finite_when_saturated(bound):
    z = jnp.asarray([-1e4, -100.0, 0.0, 100.0, 1e4]).reshape(1, 5, 1, 1)
    for A_log in (0.0, 9.0):
        arguments = z * np.exp(-A_log), jnp.full(1, A_log), jnp.zeros((1, 1))
        g = kda_gate(*arguments, bound)
        gradients = jax.grad(lambda *x: kda_gate(*x, bound).sum(), argnums=(0, 1, 2))(*arguments)
        assert np.isfinite(g).all() and np.all(g <= 0)
        assert all(np.isfinite(x).all() for x in gradients)


def test_the_rate_is_per_head():
    z = jnp.ones((1, 1, 2, 3))
    g = kda_gate(z.astype(jnp.bfloat16), jnp.asarray([0.0, 1.0]), jnp.zeros((2, 3)), -5.0)
    assert g.dtype == jnp.float32 and np.ptp(np.asarray(g), axis=-1).max() == 0 and g[0, 0, 0, 0] != g[0, 0, 1, 0]
