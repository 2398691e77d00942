"""What chunk_kda, recurrent_kda and kda_combine promise besides their values."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.common.testing import (
    assert_close,
    assert_gradients_close,
    low_precision_products,
    outputs_and_gradients,
)
from pallas_kernels.kda import chunk_kda, kda_combine, recurrent_kda
from tests.kernels.kda_cases import IMPLEMENTATIONS

ORDER = ("q", "k", "v", "g", "beta")
BOUNDS = pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "any"])
with_reference = pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS], indirect=True)


def inputs(seed, T, B=1, H=1, HV=None, K=8, V=12):
    random, HV = np.random.default_rng(seed), HV or H
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in random.standard_normal((2, B, T, H, K))]
    gate = -5 * random.random((B, T, HV, K)) ** 3
    made = *unit, random.standard_normal((B, T, HV, V)), gate, random.random((B, T, HV))
    return tuple(jnp.asarray(x, jnp.float32) for x in made)


@functools.cache
def jitted(implementation, bound):
    return jax.jit(functools.partial(chunk_kda, implementation=implementation, gate_lower_bound=bound))


@BOUNDS
def test_split_at_a_chunk_is_bit_for_bit_the_same(implementation, bound):
    tokens, run = inputs(3, 256), jitted(implementation, bound)
    o, state = run(*tokens)
    o1, carried = run(*(x[:, :128] for x in tokens))
    o2, carried = run(*(x[:, 128:] for x in tokens), initial_state=carried)
    np.testing.assert_array_equal(jnp.concatenate([o1, o2], axis=1), o)
    np.testing.assert_array_equal(carried, state)


def test_decode_steps_continue_a_prefill(implementation):
    tokens, run = inputs(4, 73, B=2, H=2, HV=4), jitted(implementation, None)
    o, state = run(*tokens)
    o_prefill, carried = run(*(x[:, :33] for x in tokens))
    step = jax.jit(recurrent_kda)
    outputs = [o_prefill]
    for t in range(33, 73):
        o_t, carried = step(*(x[:, t : t + 1] for x in tokens), initial_state=carried)
        outputs.append(o_t)
    assert_close("o", jnp.concatenate(outputs, axis=1), o, 2e-6)
    assert_close("state", carried, state, 2e-6)


@BOUNDS
def test_combine_equals_running(implementation, bound):
    """(M, S) of a run: S from a zero state, M from the identity state with v = 0. At slow gates, where M matters."""
    q, k, v, g, beta = inputs(5, 80, H=2, V=8)
    tokens = q, k, v, 0.002 * g, beta
    initial = jax.random.normal(jax.random.key(0), (1, 2, 8, 8))
    identity = jnp.broadcast_to(jnp.eye(8)[None, None], (1, 2, 8, 8))

    def run(start, stop):
        q, k, v, g, beta = (x[:, start:stop] for x in tokens)
        _, S = jitted(implementation, bound)(q, k, v, g, beta)
        _, M = jitted(implementation, bound)(q, k, jnp.zeros_like(v), g, beta, initial_state=identity)
        return M, S

    parts = [run(0, 20), run(20, 20), run(20, 40), run(40, 80)]  # the second rank has no tokens
    left = functools.reduce(lambda earlier, later: kda_combine(later, earlier), parts)
    right = functools.reduce(kda_combine, reversed(parts))
    _, expected = jitted(implementation, bound)(*tokens, initial_state=initial)
    for M, S in (left, right):
        assert_close(
            "state",
            jnp.einsum("bhij,bhjv->bhiv", M, initial) + S,
            expected,
            1e-5 if implementation == "pallas" else 2e-6,
        )


def test_small_cotangents_survive_the_bound(implementation):
    """The loss of a mean over many tokens: gradients of 1e-12 must not be lost against decay factors of e^-75."""
    q, k, v, _, beta = inputs(8, 32, K=16, V=24)
    arguments = {"q": q, "k": k, "v": v, "g": jnp.full((1, 32, 1, 16), -5.0), "beta": beta}
    arguments["initial_state"] = jax.random.normal(jax.random.key(0), (1, 1, 16, 24))
    d = jax.random.normal(jax.random.key(1), v.shape), jax.random.normal(jax.random.key(2), (1, 1, 16, 24))
    _, large = outputs_and_gradients(jitted(implementation, -5.0), arguments, d)
    _, small = outputs_and_gradients(jitted(implementation, -5.0), arguments, tuple(x * 2.0**-40 for x in d))
    assert_gradients_close(
        {name: 2.0**40 * x for name, x in small.items()}, large, 1e-6 if implementation == "pallas" else 1e-7
    )


@with_reference
def test_no_initial_state_means_zeros(implementation):
    tokens, run = inputs(15, 17), jitted(implementation, None)
    without, with_zeros = run(*tokens), run(*tokens, initial_state=jnp.zeros((1, 1, 8, 12)))
    for actual, expected in zip(without, with_zeros, strict=True):
        np.testing.assert_array_equal(actual, expected)


def gradients_of(function, tokens):
    return jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x)[0])), argnums=range(5))(*tokens)


@BOUNDS
def test_every_product_asks_for_highest_precision(bound):
    """On a TPU anything less would round float32 to bfloat16; a CPU cannot show it."""
    tokens, ids = inputs(6, 20), jnp.zeros((1, 20), jnp.int32)
    offsets = jnp.asarray([0, 20], jnp.int32)
    functions = [
        functools.partial(chunk_kda, gate_lower_bound=bound, segment_ids=ids),
        functools.partial(chunk_kda, gate_lower_bound=bound, segment_offsets=offsets),
        functools.partial(chunk_kda, implementation="reference"),
        recurrent_kda,
    ]
    for function in functions:
        jaxpr = jax.make_jaxpr(functools.partial(gradients_of, function))(tokens)
        assert "dot_general" in str(jaxpr) and not low_precision_products(jaxpr.jaxpr)
    pair = jnp.eye(3), jnp.ones((3, 2))
    assert not low_precision_products(jax.make_jaxpr(kda_combine)(pair, pair).jaxpr)
    assert low_precision_products(jax.make_jaxpr(jnp.dot)(*pair).jaxpr)


def test_nothing_grows_with_the_square_of_the_length():
    """And the backward pass keeps, besides the inputs, one state per chunk."""
    for T in (64, 256):
        tokens = inputs(7, T, H=2)
        jaxpr = jax.make_jaxpr(functools.partial(gradients_of, functools.partial(chunk_kda)))(tokens)
        largest = max(x.aval.size for equation in jaxpr.jaxpr.eqns for x in equation.outvars if hasattr(x.aval, "size"))
        assert largest <= T * 2 * 16, "a tensor larger than one K x V state per 16 tokens, or than the inputs"


@BOUNDS
@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=pytest.mark.slow), False])
def test_shard_map_over_batch_and_heads(make_mesh, bound, check_vma):
    tokens = inputs(8, 20, B=4, H=2)
    mesh = make_mesh(data=4, tensor=2)
    specs = (PartitionSpec("data", None, "tensor"),) * 5
    with jax.set_mesh(mesh):
        sharded = tuple(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(tokens, specs, strict=True))
        ids = jax.device_put(
            jnp.asarray([[0] * 9 + [1] * 11] * 4, jnp.int32), NamedSharding(mesh, PartitionSpec("data"))
        )

        def local(ids, *tokens):
            return chunk_kda(*tokens, segment_ids=ids, gate_lower_bound=bound)

        mapped = jax.shard_map(
            local,
            in_specs=(PartitionSpec("data"), *specs),
            out_specs=(specs[0], PartitionSpec("data", "tensor")),
            check_vma=check_vma,
        )
        actual = jax.jit(functools.partial(mapped, ids))(*sharded)
        gradients = jax.jit(functools.partial(gradients_of, functools.partial(mapped, ids)))(sharded)
    whole = functools.partial(chunk_kda, segment_ids=jnp.asarray(np.asarray(ids)), gate_lower_bound=bound)
    for name, a, b in zip(("o", "state"), actual, jax.jit(whole)(*tokens), strict=True):
        assert_close(name, a, b, 1e-6)
    expected = jax.jit(functools.partial(gradients_of, whole))(tokens)
    assert_gradients_close(*(dict(zip(ORDER, x, strict=True)) for x in (gradients, expected)), 1e-5)


def test_explicit_mesh_without_shard_map(make_mesh):
    """Sharded over batch and heads by type alone: no resharding, and the results carry the sharding."""
    tokens = inputs(8, 20, B=4, H=2)
    mesh, spec = make_mesh(data=4, tensor=2), PartitionSpec("data", None, "tensor")
    with jax.set_mesh(mesh):
        sharded = tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x in tokens)
        ids = jax.device_put(jnp.zeros((4, 20), jnp.int32), NamedSharding(mesh, PartitionSpec("data")))
        function = functools.partial(chunk_kda, gate_lower_bound=-5.0, segment_ids=ids)
        o, state = jax.jit(function)(*sharded)
        gradients = jax.jit(functools.partial(gradients_of, function))(sharded)
        assert o.sharding.spec == PartitionSpec("data", None, "tensor", None)
        assert state.sharding.spec == PartitionSpec("data", "tensor", None, None)
    expected = jax.jit(functools.partial(gradients_of, jitted("xla", -5.0)))(tokens)
    assert_gradients_close(*(dict(zip(ORDER, x, strict=True)) for x in (gradients, expected)), 1e-5)


def test_under_checkpoint_vmap_and_forward_differentiation():
    tokens = inputs(9, 20, B=2)
    function = functools.partial(chunk_kda, gate_lower_bound=-5.0)
    expected = jax.jit(functools.partial(gradients_of, function))(tokens)
    saved = jax.jit(functools.partial(gradients_of, jax.checkpoint(function)))(tokens)
    mapped = jax.jit(functools.partial(gradients_of, jax.vmap(function)))(tuple(x[:, None] for x in tokens))
    for other in (saved, tuple(x[:, 0] for x in mapped)):
        assert_gradients_close(*(dict(zip(ORDER, x, strict=True)) for x in (other, expected)), 1e-6)
    _, tangent = jax.jvp(lambda *x: jnp.sum(jnp.sin(function(*x)[0])), tokens, tokens)
    assert_close("tangent", tangent, sum(jnp.sum(x * d) for x, d in zip(tokens, expected, strict=True)), 1e-5)


@BOUNDS
@with_reference
def test_padding_leaves_the_state_bit_for_bit(implementation, bound):
    tokens, initial_state = inputs(4, 12), jnp.ones((1, 1, 8, 12))
    padded = [jnp.pad(x, [(0, 0), (0, 30), *[(0, 0)] * (x.ndim - 2)], constant_values=jnp.nan) for x in tokens]
    ids = jnp.asarray([[5] * 12 + [-1] * 30], jnp.int32)
    for run in (jitted(implementation, bound), jax.jit(recurrent_kda)):
        _, state = run(*tokens, initial_state=initial_state)
        _, after = run(*padded, segment_ids=ids, initial_state=initial_state)
        np.testing.assert_array_equal(after, state)


@BOUNDS
@with_reference
def test_segments_under_strict_promotion(strict_promotion, implementation, bound):
    q, k, v, g, beta = inputs(5, 20)
    tokens = *(x.astype(jnp.bfloat16) for x in (q, k, v)), g, beta
    ids, offsets = jnp.asarray([[0] * 12 + [1] * 8], jnp.int32), jnp.asarray([0, 20], jnp.int32)
    for segments in ({"segment_ids": ids}, {"segment_offsets": offsets}):
        jax.eval_shape(jitted(implementation, bound), *tokens, **segments)


@with_reference
def test_no_tokens(implementation):
    tokens, state = inputs(10, 0, B=2), jnp.ones((2, 1, 8, 12))
    o, after = chunk_kda(*tokens, initial_state=state, implementation=implementation)
    assert o.shape == (2, 0, 1, 12)
    np.testing.assert_array_equal(after, state)
    assert not np.any(chunk_kda(*tokens, implementation=implementation)[1])
    _, after = chunk_kda(*inputs(10, 0), initial_state=jnp.ones((3, 1, 8, 12)), segment_offsets=jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(after, jnp.ones((3, 1, 8, 12)))
    assert recurrent_kda(*tokens, initial_state=state)[0].shape == (2, 0, 1, 12)


WRONG = {
    "rank": ({"q": (1, 4, 8)}, r"q.shape = \(1, 4, 8\): expected 4 dimensions"),
    "heads": ({"v": (1, 4, 3, 5), "g": (1, 4, 3, 8), "beta": (1, 4, 3)}, r"v.shape = .*2 divides"),
    "key": ({"q": (1, 4, 2, 7)}, r"q.shape = \(1, 4, 2, 7\): expected \(1, 4, 2, 8\)"),
    "gate": ({"g": (1, 4, 2, 8)}, r"g.shape = .*expected \(1, 4, 4, 8\)"),
    "beta": ({"beta": (1, 4, 2)}, r"beta.shape = .*expected \(1, 4, 4\)"),
    "state": ({"initial_state": (1, 4, 5, 8)}, r"initial_state.shape = .*expected \(1, 4, 8, 5\)"),
    "bound": ({"gate_lower_bound": -6.0}, r"gate_lower_bound = -6.0: expected -5.9 <= bound < 0"),
    "zero bound": ({"gate_lower_bound": 0.0}, r"gate_lower_bound = 0.0: expected"),
    "ids": ({"segment_ids": np.zeros((1, 5), np.int32)}, r"segment_ids.shape = .*expected \(1, 4\)"),
    "float ids": ({"segment_ids": np.zeros((1, 4), np.float32)}, r"segment_ids.dtype = float32: expected int32"),
    "both": (
        {"segment_ids": np.zeros((1, 4), np.int32), "segment_offsets": np.array([0, 4], np.int32)},
        "segment_offsets: expected None where segment_ids is given",
    ),
    "offsets": ({"segment_offsets": np.array([0], np.int32)}, r"segment_offsets.shape = \(1,\): expected \[N \+ 1\]"),
    "name": ({"implementation": "mosaic"}, "implementation = 'mosaic': expected None, 'reference', 'xla' or 'pallas'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument(case):
    """As users see them, who run without the runtime type checker of these tests."""
    changes, message = WRONG[case]
    shapes = {"q": (1, 4, 2, 8), "k": (1, 4, 2, 8), "v": (1, 4, 4, 5), "g": (1, 4, 4, 8), "beta": (1, 4, 4)}
    arguments = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    arguments |= {n: np.zeros(x, np.float32) if isinstance(x, tuple) else x for n, x in changes.items()}
    function = getattr(chunk_kda, "__wrapped__", chunk_kda)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match=message):
            function(**arguments)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_a_named_implementation_never_falls_back():
    """A CPU has no Pallas kernel outside interpret mode."""
    with pytest.raises(ValueError, match="Only interpret mode"):
        chunk_kda(*inputs(11, 4), implementation="pallas")
