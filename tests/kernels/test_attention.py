"""Attention of Gated MLA against the full matrix of scores in float64, outputs, largest logits and all gradients."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3_jax.config import MeshConfig
from k3_jax.mesh import make_mesh
from pallas_kernels.attention import blocks, pallas, pallas_bwd, pallas_fwd, steps
from pallas_kernels.attention.api import mla_attention
from pallas_kernels.common.testing import assert_close, assert_gradients_close, equations, outputs_and_gradients
from tests.kernels.mutation import replace

SCALE = 0.2


def dense(q_nope, q_pe, kv, k_pe, segment_ids=None):
    N, T = q_nope.shape[3], q_nope.shape[1]
    s = jnp.einsum("bthn,bshn->bhts", q_nope, kv[..., :N]) + jnp.einsum("bthr,bsr->bhts", q_pe, k_pe)
    allowed = np.tril(np.ones((T, T), bool))[None]
    if segment_ids is not None:
        allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids >= 0)[:, :, None]
    s = jnp.where(allowed[:, None], s * SCALE, -1e30)
    p = jnp.where(allowed[:, None], jax.nn.softmax(s, axis=-1), 0)
    return jnp.einsum("bhts,bshv->bthv", p, kv[..., N:]), jax.lax.stop_gradient(s.max((0, 2, 3)))


@functools.cache
def attention(implementation):
    return functools.partial(mla_attention, scale=SCALE, implementation=implementation)


@functools.cache
def by_parts(implementation, count):
    """The whole row, from queries in so many parts."""

    def run(q_nope, q_pe, kv, k_pe, segment_ids=None):
        T = q_nope.shape[1] // count
        parts = [
            attention(implementation)(*q, kv, k_pe, segment_ids, start=jnp.int32(i * T))
            for i, *q in zip(range(count), *(jnp.split(x, count, axis=1) for x in (q_nope, q_pe)), strict=True)
        ]
        o, peak = zip(*parts, strict=True)
        return jnp.concatenate(o, axis=1), jnp.stack(peak).max(0)

    return run


def inputs(B, T, H, N, R, V, segments=None, dtype=np.float32, seed=0, size=1.0):
    random = np.random.default_rng(seed)
    normal = lambda *shape: (size * random.normal(size=shape)).astype(dtype)  # noqa: E731
    made = {
        "q_nope": normal(B, T, H, N),
        "q_pe": normal(B, T, H, R),
        "kv": normal(B, T, H, N + V),
        "k_pe": normal(B, T, R),
    }
    if segments is not None:
        made["segment_ids"] = np.stack([np.repeat(ids, counts)[:T] for ids, counts in segments]).astype(np.int32)
    return made


def check(attend, arguments, tolerance, gradient_tolerance):
    B, T, H, N = arguments["q_nope"].shape
    do = np.random.default_rng(9).normal(size=(B, T, H, arguments["kv"].shape[3] - N)).astype(arguments["kv"].dtype)
    with jax.enable_x64(True):
        wide = {n: x if n == "segment_ids" else x.astype(np.float64) for n, x in arguments.items()}
        (o, peak), expected = outputs_and_gradients(dense, wide, (do.astype(np.float64), np.zeros(H)))
        o, peak, expected = jax.tree.map(np.asarray, (o, peak, expected))
    actual, gradients = outputs_and_gradients(attend, arguments, (do, np.zeros(H, np.float32)))
    assert actual[0].dtype == arguments["kv"].dtype and actual[1].dtype == np.float32
    assert_close("o", actual[0], o, tolerance)
    np.testing.assert_allclose(actual[1], peak, rtol=max(1e-5, tolerance))
    assert_gradients_close(gradients, expected, gradient_tolerance)
    if "segment_ids" in arguments:
        assert not np.any(np.asarray(actual[0])[arguments["segment_ids"] < 0])


DOCUMENTS = [([3, 4, 5], [7, 1, 400]), ([0, -1], [5, 400])]
PADDING = [([-1, 2, -1], [3, 200, 200]), ([-1], [400])]
BACK_AND_FORTH = [([7, 2, 7], [150, 100, 150]), ([1, 0, 1, 0], [60, 90, 60, 190])]
CASES = {
    "one-token": inputs(1, 1, 1, 4, 2, 4),
    "odd-heads": inputs(2, 17, 3, 5, 4, 6),
    "two-blocks": inputs(1, 200, 2, 16, 8, 24),
    "documents": inputs(2, 300, 2, 8, 4, 8, DOCUMENTS),
    "padding": inputs(2, 384, 1, 8, 4, 8, PADDING),
    "an-id-returns": inputs(2, 400, 2, 8, 4, 8, BACK_AND_FORTH),
    "wide": inputs(1, 130, 2, 128, 64, 136),
    "whole-blocks": inputs(1, 512, 2, 8, 4, 8),
    "whole-blocks-of-documents": inputs(2, 640, 2, 8, 4, 8, [([0, 1], [300, 340]), ([4], [640])]),
    "whole-blocks-with-padding": inputs(1, 384, 1, 8, 4, 8, [([0, -1, 0], [100, 20, 264])]),
    "large-logits": inputs(1, 150, 2, 8, 4, 8, size=8.0),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks, and several spans of queries, in short sequences."""
    monkeypatch.setattr(pallas, "BLOCK", {2: 128, 4: 128})
    monkeypatch.setattr(pallas, "SPAN", 256)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("case", CASES)
def test_case(implementation, case, small_blocks, interpreted):
    check(attention(implementation), CASES[case], 1e-5, 2e-5)


PARTS = [("xla", "whole-blocks-with-padding", 3), ("pallas", "whole-blocks-with-padding", 3)]
MORE_PARTS = [("pallas", "whole-blocks", 2), ("pallas", "whole-blocks-of-documents", 5), ("pallas", "spans", 2)]
SPANS = {"spans": inputs(1, 768, 2, 8, 4, 8, [([0, 1], [500, 268])])}


@pytest.mark.parametrize(
    ("implementation", "case", "count"), PARTS + [pytest.param(*x, marks=pytest.mark.slow) for x in MORE_PARTS]
)
def test_parts_of_the_queries(implementation, case, count, small_blocks, interpreted):
    """They see what the whole row sees; the keys' gradients are sums over the parts, also where one sees nothing."""
    check(by_parts(implementation, count), (CASES | SPANS)[case], 1e-5, 2e-5)


@pytest.mark.slow
def test_keys_that_nobody_sees_need_a_step(monkeypatch, small_blocks, interpreted):
    monkeypatch.setattr(pallas, "with_unseen", lambda pairs: pairs)
    by_parts.cache_clear()
    with pytest.raises(AssertionError):
        check(by_parts("pallas", 3), CASES["whole-blocks-with-padding"], 1e-5, 2e-5)
    by_parts.cache_clear()


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_bfloat16(implementation, small_blocks, interpreted):
    """Against float64 of the same rounded inputs; softmax and sums are float32."""
    check(attention(implementation), inputs(1, 256, 2, 16, 8, 16, dtype=jnp.bfloat16), 5e-3, 1e-2)


@pytest.mark.slow
def test_blocks_as_on_a_tpu(interpreted):
    """The sizes of blocks and tiles that are compiled, with pairs of blocks of every kind."""
    check(attention("pallas"), inputs(1, 2200, 2, 8, 4, 8, [([0, 1, -1], [2100, 90, 10])]), 1e-5, 2e-5)


def test_nothing_of_the_future_is_seen(small_blocks, interpreted):
    """Bit for bit: outputs before a token that changes, and gradients after the last cotangent."""
    arguments = inputs(1, 300, 2, 8, 4, 8)
    later = {name: x.copy() for name, x in arguments.items()}
    for x in later.values():
        x[:, 200:] += 1.0
    do = np.random.default_rng(1).normal(size=(1, 300, 2, 8)).astype(np.float32)
    do[:, 200:] = 0

    def outputs(arguments):
        o, pullback = jax.vjp(lambda a: attention("pallas")(**a)[0], arguments)
        return np.asarray(o), jax.tree.map(np.asarray, pullback(jnp.asarray(do))[0])

    (o, gradients), (o_later, gradients_later) = outputs(arguments), outputs(later)
    np.testing.assert_array_equal(o[:, :200], o_later[:, :200])
    assert np.any(o[:, 200:] != o_later[:, 200:])
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient[:, :200], gradients_later[name][:, :200])
        assert not np.any(gradient[:, 200:])


def gradients(implementation, arguments):
    def loss(floating):
        o, peak = attention(implementation)(**floating, segment_ids=jnp.asarray(arguments["segment_ids"]))
        return jnp.sum(jnp.sin(o.astype(jnp.float32))), peak

    floating = {name: x for name, x in arguments.items() if name != "segment_ids"}
    return jax.value_and_grad(loss, has_aux=True), floating


def assert_same(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close("", x, y, 2e-5)


@pytest.mark.parametrize("dma_execution_mode", ["eager", pytest.param("on_wait", marks=pytest.mark.slow)])
def test_without_races_and_with_unset_memory_nan(dma_execution_mode, small_blocks):
    arguments = CASES["documents"]
    params = pltpu.InterpretParams(
        detect_races=True, on_race="raise", uninitialized_memory="nan", dma_execution_mode=dma_execution_mode
    )
    of_xla, floating = gradients("xla", arguments)
    with pltpu.force_tpu_interpret_mode(params):
        actual = jax.block_until_ready(jax.jit(gradients("pallas", arguments)[0])(floating))
    assert_same(actual, jax.jit(of_xla)(floating))


@pytest.mark.slow
def test_inside_shard_map(small_blocks, interpreted):
    """Rows and heads on four devices; the extra keys, the same for all heads, get the sum of their gradients."""
    B, T, H, (N, R, V) = 2, 300, 4, (8, 4, 8)
    arguments = inputs(B, T, H, N, R, V, [([0, 1], [50, 250]), ([0, -1], [280, 20])])
    specs = {name: P("data", None, "tensor") if x.ndim == 4 else P("data") for name, x in arguments.items()}

    def total(floating, ids):
        def part(floating, ids):
            o, _ = attention("pallas")(**floating, segment_ids=ids)
            return jax.lax.psum(jnp.sum(jnp.sin(o)), ("data", "tensor"))

        of_floating = {name: specs[name] for name in floating}
        # Unchecked, for the interpreter: it multiplies the length of the grid, which varies, by what does not.
        run = jax.shard_map(part, in_specs=(of_floating, specs["segment_ids"]), out_specs=P(), check_vma=False)
        return run(floating, ids)

    of_xla, floating = gradients("xla", arguments)
    (expected, _), expected_gradients = jax.jit(of_xla)(floating)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])):
        mesh = jax.sharding.get_mesh()
        placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arguments.items()}
        ids = placed.pop("segment_ids")
        actual = jax.device_get(jax.jit(jax.value_and_grad(total))(placed, ids))
    assert_same(actual, (expected, expected_gradients))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_precision_of_products(dtype):
    """float32 operands ask for full precision; whatever the operands are, sums are float32."""
    of, floating = gradients("pallas", inputs(1, 128, 2, 8, 4, 8, [([0], [128])], dtype=dtype))
    products = [e for e in equations(jax.make_jaxpr(of)(floating).jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) > 10
    for e in products:
        assert e.outvars[0].aval.dtype == jnp.float32
        if {x.aval.dtype for x in e.invars} == {jnp.dtype("float32")}:
            assert e.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
    assert dtype == jnp.bfloat16 or all(x.aval.dtype == jnp.float32 for e in products for x in e.invars)


UNCHECKED = inspect.unwrap(mla_attention)  # without the annotations' own errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_pe": np.zeros((1, 17, 3, 5), np.float32)}, "q_pe.shape"),
        ({"kv": np.zeros((1, 17, 3, 5), np.float32)}, "expected more than 5 channels"),
        ({"k_pe": np.zeros((1, 17, 4, 1), np.float32)}, "k_pe.shape"),
        ({"segment_ids": np.zeros((1, 16), np.int32)}, "segment_ids.shape"),
        ({"implementation": "fast"}, "implementation = 'fast'"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        UNCHECKED(**(inputs(1, 17, 3, 5, 4, 6) | {"scale": 1.0} | change))


def test_extra_keys_of_more_than_half_a_lane_tile():
    with pytest.raises(ValueError, match="R <= 64"):
        UNCHECKED(**inputs(1, 4, 2, 8, 65, 8), scale=1.0, implementation="pallas")


def test_a_part_of_the_queries_without_a_start():
    arguments = inputs(1, 32, 2, 8, 4, 8)
    half = {name: x[:, :16] if name.startswith("q") else x for name, x in arguments.items()}
    with pytest.raises(ValueError, match="expected 16 keys, or with a start a multiple of them"):
        UNCHECKED(**half, scale=1.0)
    with pytest.raises(ValueError, match="T a multiple of 128 with a start"):
        UNCHECKED(**half, scale=1.0, start=jnp.int32(16), implementation="pallas")


def padding_attends(monkeypatch):
    replace(monkeypatch, blocks.allowed, {" & (of_query >= 0)": ""}, pallas_fwd, pallas_bwd)
    return "padding"


def rows_without_keys_are_averages(monkeypatch):
    changes = {"jnp.where(scores[keys] > NEGATIVE, p, 0.0)": "p"}
    replace(monkeypatch, pallas_fwd._attend, changes)
    return "padding"


def a_block_with_padding_is_whole(monkeypatch):
    replace(monkeypatch, steps.pairs_of, {" & jnp.all(ids >= 0, axis=2)": ""}, pallas)
    return "whole-blocks-with-padding"


def keys_of_other_spans_are_forgotten(monkeypatch):
    replace(monkeypatch, pallas_bwd._finish, {"extra if earlier is None else": "extra if True else"})
    return "whole-blocks"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [padding_attends, rows_without_keys_are_averages, a_block_with_padding_is_whole, keys_of_other_spans_are_forgotten],
)
def test_a_mistake_fails(mistake, monkeypatch, small_blocks, interpreted):
    case = mistake(monkeypatch)
    attention.cache_clear()
    with pytest.raises(AssertionError):
        check(attention("pallas"), CASES[case], 1e-5, 2e-5)
    attention.cache_clear()
