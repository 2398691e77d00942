"""KDA against a third party's recurrence (flash-linear-attention 0.6.0, float32): outputs and every gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.testing import assert_close, assert_gradients_close, outputs_and_gradients
from pallas_kernels.kda import chunk_kda, kda_gate
from tests.kernels.kda_cases import IMPLEMENTATIONS

PREACTIVATED = {
    "c1_preact_h0_T64": None,
    "c2_ragged_T77_KneV": None,
    "c6_gva_negeig_T81": None,
    "c7_bounds_identical_keys": -5.0,
}
RAW = ["c3_lowerbound_T130", "c4_unbounded_softplus_T100", "c5_varlen_zero_len"]
with_reference = pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS], indirect=True)


def load(golden, case):
    """The file's arrays by chunk_kda's names, its cotangents, and its results."""
    with np.load(golden / f"kda_{case}.npz") as file:
        data = {name: file[name] for name in file}
    rename = {"h0": "initial_state", "d_h0": "d_initial_state", "cu_seqlens": "segment_offsets"}
    return {rename.get(name, name): value for name, value in data.items()}


def check(op, data, tolerance_of_outputs, tolerance_of_gradients):
    expected = {name[2:]: value for name, value in data.items() if name.startswith("d_")}
    arguments = {name: jnp.asarray(data[name]) for name in expected}
    if "segment_offsets" in data:
        arguments["segment_offsets"] = jnp.asarray(data["segment_offsets"])
    cotangents = jnp.asarray(data["do"]), jnp.asarray(data["dht"])
    (o, final_state), gradients = outputs_and_gradients(op, arguments, cotangents)
    assert_close("o", o, data["o"], tolerance_of_outputs)
    assert_close("final_state", final_state, data["ht"], tolerance_of_outputs)
    assert_gradients_close(gradients, expected, tolerance_of_gradients)
    return final_state, gradients


@with_reference
@pytest.mark.parametrize("case", PREACTIVATED)
def test_activated_inputs(golden, case, implementation):
    data = load(golden, case)
    scale = float(data["scale"]) if "scale" in data else None

    def op(**arguments):
        return chunk_kda(**arguments, scale=scale, gate_lower_bound=PREACTIVATED[case], implementation=implementation)

    check(op, data, 2e-5, 1e-4)


@pytest.mark.parametrize("bound", [None, -5.0], ids=["any", "bounded"])
def test_gate_at_its_bound_with_identical_keys(golden, bound):
    """The form for any gate must agree where the bounded one applies."""

    def op(**arguments):
        return chunk_kda(**arguments, gate_lower_bound=bound, implementation="xla")

    check(op, load(golden, "c7_bounds_identical_keys"), 2e-6, 2e-5)


def from_raw(implementation, bound, q, k, v, g_raw, beta_raw, A_log, dt_bias, **states):
    """What a layer does around the operation: normalise, gate, squash."""

    def normalise(x):
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

    g = kda_gate(g_raw, A_log, dt_bias.reshape(g_raw.shape[-2:]), bound)
    beta = jax.nn.sigmoid(beta_raw)
    return chunk_kda(
        normalise(q), normalise(k), v, g, beta, gate_lower_bound=bound, implementation=implementation, **states
    )


@functools.cache
def raw_op(implementation, bound):
    return functools.partial(from_raw, implementation, bound)


@with_reference
@pytest.mark.parametrize("case", RAW)
def test_raw_inputs(golden, case, implementation):
    data = load(golden, case)
    op = raw_op(implementation, float(data["lower_bound"]) if "lower_bound" in data else None)
    # c4 forgets by e^-765 in a step; the recurrence that made the file sums such gates in float32.
    unbounded = case.startswith("c4")
    final_state, gradients = check(op, data, 2e-5, 5e-4 if unbounded else 1e-4)
    if "segment_offsets" in data:
        (empty,) = np.flatnonzero(np.diff(data["segment_offsets"]) == 0)
        np.testing.assert_array_equal(final_state[empty], data["initial_state"][empty])
        np.testing.assert_array_equal(gradients["initial_state"][empty], data["dht"][empty])


@with_reference
def test_queries_and_keys_of_zero(golden, implementation):
    """Which a norm without its epsilon would make NaN."""
    data = load(golden, RAW[0])
    arguments = {name[2:]: data[name[2:]] for name in data if name.startswith("d_")}
    for name in ("q", "k"):
        arguments[name][:, 60:70] = 0
    op = raw_op(implementation, float(data["lower_bound"]))
    results, gradients = outputs_and_gradients(op, arguments, (data["do"], data["dht"]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((results, gradients)))
    assert not np.any(results[0][:, 60:70])


@pytest.mark.parametrize("case", RAW)
def test_gate_values(golden, case):
    data = load(golden, case)
    bound = float(data["lower_bound"]) if "lower_bound" in data else None
    bias = data["dt_bias"].reshape(data["g_raw"].shape[-2:])
    g = kda_gate(*(jnp.asarray(x) for x in (data["g_raw"], data["A_log"], bias)), bound)
    assert_close("g", g, data["g_act"], 1e-6)
    assert g.dtype == jnp.float32
