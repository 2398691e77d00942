"""The chunked form against the recurrence in float64, over the gates, keys and lengths where such kernels break."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.testing import (
    assert_close,
    assert_gradients_close,
    in_float64,
    outputs_and_gradients,
    relative_rms,
)
from pallas_kernels.kda import chunk_kda

# One gate regime per row of the batch: constants up to the bound, then spans of a uniform gate.
CONSTANTS, SPANS = (-0.05, -1.0, -2.5, -4.999, -5.0), (0.05, 0.5, 2.0, 5.0)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def inputs(seed, B, T, H=1, HV=None, K=16, V=24, state=True):
    """Random q, k, v, beta and state as float32 numpy arrays, with a gate over all of (-5, 0)."""
    random, HV = np.random.default_rng(seed), HV or H
    made = {
        "q": unit(random.standard_normal((B, T, H, K))),
        "k": unit(random.standard_normal((B, T, H, K))),
        "v": random.standard_normal((B, T, HV, V)),
        "g": -5 * random.random((B, T, HV, K)),
        "beta": random.random((B, T, HV)),
    }
    if state:
        made["initial_state"] = random.standard_normal((B, HV, K, V))
    return {name: x.astype(np.float32) for name, x in made.items()}


def cotangents(seed, arguments):
    random = np.random.default_rng(seed)
    B, T, HV, V = arguments["v"].shape
    do, dstate = random.standard_normal((B, T, HV, V)), random.standard_normal((B, HV, arguments["k"].shape[-1], V))
    return do.astype(np.float32), dstate.astype(np.float32)


@functools.cache
def op(bound, implementation="xla"):
    return functools.partial(chunk_kda, gate_lower_bound=bound, implementation=implementation)


def check(arguments, bound, tolerance=2e-6, gradient_tolerance=1e-5):
    """Outputs row by row (each its own regime), gradients together; the oracle itself must be finite."""
    d = cotangents(99, arguments)
    (o, state), gradients = outputs_and_gradients(op(bound), {n: jnp.asarray(x) for n, x in arguments.items()}, d)
    (o_exact, state_exact), exact = in_float64(op(None, "reference"), arguments, d)
    assert np.isfinite(o_exact).all() and np.isfinite(state_exact).all()
    for row in range(o.shape[0]):
        assert_close(f"o, row {row}", o[row], o_exact[row], tolerance)
        assert_close(f"final_state, row {row}", state[row], state_exact[row], tolerance)
    assert_gradients_close(gradients, exact, gradient_tolerance)


def gate_regimes(T):
    arguments = inputs(1, len(CONSTANTS) + len(SPANS), T)
    for row, value in enumerate(CONSTANTS):
        arguments["g"][row] = value
    for row, span in enumerate(SPANS, len(CONSTANTS)):
        arguments["g"][row] *= span / 5
    return arguments


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "any"])
@pytest.mark.parametrize("T", [1, 17, 65])
def test_gates_over_the_whole_range(T, bound):
    check(gate_regimes(T), bound)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "any"])
@pytest.mark.parametrize("T", [15, 16, 63, 64, 130, 1000])
def test_gates_over_the_whole_range_at_more_lengths(T, bound):
    check(gate_regimes(T), bound)


def test_lowest_bound_that_is_accepted():
    arguments = inputs(2, 2, 33)
    arguments["g"][0] = -5.9
    arguments["g"][1] *= 5.9 / 5
    check(arguments, -5.9)


def correlated_keys(T):
    """Rows: correlations 0, 0.9, 0.99, identical keys, and keys of alternating sign written with beta = 1.9."""
    arguments = inputs(3, 5, T, K=32, V=16)
    common = unit(np.random.default_rng(4).standard_normal(32)).astype(np.float32)
    for row, rho in enumerate((0.0, 0.9, 0.99, 1.0)):
        arguments["k"][row] = unit(rho**0.5 * common + (1 - rho) ** 0.5 * arguments["k"][row])
    arguments["k"][4] = common * np.where(np.arange(T) % 2, -1, 1)[:, None, None]
    arguments["beta"][3:] = np.array([1.0, 1.9])[:, None, None]
    arguments["g"][:] = -1e-4
    return arguments


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "any"])
def test_correlated_keys(bound):
    """An inverse by powers of L loses every digit here; random keys do not show it."""
    check(correlated_keys(130), bound, tolerance=5e-6, gradient_tolerance=3e-5)


def test_channel_that_forgets_at_every_step():
    arguments = inputs(5, 1, 64)
    arguments["g"][:] = -0.01
    arguments["g"][..., 3] = -25.8
    check(arguments, None)


def test_single_steps_that_forget_everything():
    """The gradient below the floor of e^-30 is zero, where the true one is under 1e-13."""
    arguments = inputs(6, 2, 80)
    spikes = np.random.default_rng(7).random(arguments["g"].shape) < np.array([0.05, 0.5])[:, None, None, None]
    arguments["g"] = np.where(spikes, np.float32(-1000), 0.1 * arguments["g"])
    arguments["g"][1, 7:50:9] = -np.inf
    check(arguments, None)


def test_small_cotangents_survive_the_bound():
    """The loss of a mean over many tokens: gradients of 1e-12 must not be lost against decay factors of e^-75."""
    arguments = {n: jnp.asarray(x) for n, x in inputs(8, 1, 32).items()} | {"g": jnp.full((1, 32, 1, 16), -5.0)}
    d = cotangents(9, arguments)
    _, large = outputs_and_gradients(op(-5.0), arguments, d)
    _, small = outputs_and_gradients(op(-5.0), arguments, tuple(x * 2.0**-40 for x in d))
    assert_gradients_close({n: 2.0**40 * x for n, x in small.items()}, large, 1e-7)


def test_grouped_heads_and_writes_up_to_two():
    arguments = inputs(10, 2, 40, H=2, HV=6, K=24, V=8)
    arguments["beta"] *= 2
    check(arguments, -5.0)


def test_values_of_beta_that_write_nothing_all_and_reflect():
    arguments = inputs(11, 3, 40)
    arguments["beta"][:] = np.array([0.0, 1.0, 2.0])[:, None, None]
    check(arguments, -5.0)


@pytest.mark.slow
def test_keys_that_are_not_normalised():
    """No contraction: the state grows, and errors are measured against the largest value."""
    random = np.random.default_rng(12)
    arguments = inputs(12, 2, 128, H=4, K=32, V=32, state=False)
    for name in ("q", "k", "beta"):
        arguments[name] = random.standard_normal(arguments[name].shape).astype(np.float32)
    rate = random.uniform(1, 4, (4, 1))
    arguments["g"] = (-rate * np.logaddexp(0, random.standard_normal(arguments["g"].shape))).astype(np.float32)
    d = cotangents(99, arguments)
    (o, state), _ = outputs_and_gradients(op(None), {n: jnp.asarray(x) for n, x in arguments.items()}, d)
    (o_exact, state_exact), _ = in_float64(op(None, "reference"), arguments, d)
    for actual, expected in ((o, o_exact), (state, state_exact)):
        assert np.abs(actual - expected).max() <= 5e-5 * np.abs(expected).max()


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "any"])
def test_bfloat16_inputs(bound):
    """Only the inputs and the output are rounded: as good as the recurrence on the same rounded inputs."""
    arguments = {n: jnp.asarray(x) for n, x in inputs(13, 2, 40).items()}
    arguments |= {n: arguments[n].astype(jnp.bfloat16) for n in ("q", "k", "v", "beta")}
    d = cotangents(14, arguments)
    (o, state), gradients = outputs_and_gradients(op(bound), arguments, d)
    (o_exact, state_exact), exact = in_float64(op(None, "reference"), arguments, d)
    assert o.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    assert {n: x.dtype for n, x in gradients.items()} == {n: x.dtype for n, x in arguments.items()}
    assert_close("o", o, o_exact, 3e-3)
    assert_close("final_state", state, state_exact, 2e-6)
    assert_gradients_close({n: np.asarray(x, np.float64) for n, x in gradients.items()}, exact, 3e-3)


def test_no_initial_state_means_zeros():
    arguments = {n: jnp.asarray(x) for n, x in inputs(15, 1, 17).items()}
    zeros = jnp.zeros_like(arguments.pop("initial_state"))
    for implementation in ("xla", "reference"):
        without = chunk_kda(**arguments, implementation=implementation)
        with_zeros = chunk_kda(**arguments, initial_state=zeros, implementation=implementation)
        for actual, expected in zip(without, with_zeros, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_the_measure_sees_wrong_variants():
    """The tolerances above are tight: an undecayed prediction and an undecayed read are far outside them."""
    arguments = {n: jnp.asarray(x) for n, x in inputs(16, 1, 40).items()}
    o, state = chunk_kda(**arguments)
    late_gate = jnp.roll(arguments["g"], 1, axis=1)
    o_wrong, state_wrong = chunk_kda(**(arguments | {"g": late_gate}))
    assert relative_rms(o_wrong, o) > 1e-2 and relative_rms(state_wrong, state) > 1e-2
