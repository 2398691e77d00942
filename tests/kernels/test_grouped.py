"""Grouped products on a TPU against a loop over the groups in float64, and what is computed for which sizes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from k3_jax.config import MeshConfig
from k3_jax.mesh import make_mesh
from pallas_kernels.common.testing import assert_close, equations
from pallas_kernels.grouped import grouped_matmul, grouped_outer, grouped_transposed, pallas, visits
from pallas_kernels.grouped.visits import Blocks, visits_of
from tests.kernels.mutation import replace

PRODUCTS = {"matmul": grouped_matmul, "transposed": grouped_transposed, "outer": grouped_outer}
SIZES = {
    "blocks": [512, 512, 256],
    "borders-inside": [100, 300, 700, 180],
    "one-row-each": [1] * 7,
    "empty-groups": [0, 130, 0, 0, 513, 0],
    "one-group": [0, 0, 1500],
    "last-block-cut": [511, 2, 600],
}


def arrays(sizes, A=256, C=128, dtype=np.float32, seed=0):
    random, R = np.random.default_rng(seed), sum(sizes)
    shapes = {"x": (R, A), "dy": (R, C), "w": (len(sizes), A, C)}
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


OPERANDS = {"matmul": ("x", "w"), "transposed": ("dy", "w"), "outer": ("x", "dy")}


def run(product, sizes, given, *dtype):
    """Traced anew, as blocks, the interpreter's mode and mistakes differ from test to test."""
    operands = [jnp.asarray(given[name]) for name in OPERANDS[product]]
    return np.asarray(jax.jit(lambda *args: PRODUCTS[product](*args, *dtype))(*operands, jnp.asarray(sizes, jnp.int32)))


def loop(product, sizes, given):
    """In float64, one group after the other."""
    edges = np.cumsum([0, *sizes])
    x, dy, w = (given[name].astype(np.float64) for name in ("x", "dy", "w"))
    parts = [slice(*edge) for edge in itertools.pairwise(edges)]
    match product:
        case "matmul":
            return np.concatenate([x[rows] @ w[g] for g, rows in enumerate(parts)])
        case "transposed":
            return np.concatenate([dy[rows] @ w[g].T for g, rows in enumerate(parts)])
        case _:
            return np.stack([x[rows].T @ dy[rows] for rows in parts])


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of rows, and several parts of both widths."""
    monkeypatch.setattr(visits, "MOST", 512)
    monkeypatch.setattr(pallas, "_cuts", lambda width: [128])


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("sizes", SIZES)
def test_case(product, sizes, small_blocks, interpreted):
    given = arrays(SIZES[sizes])
    actual = run(product, SIZES[sizes], given)
    assert actual.dtype == np.float32
    assert_close(product, actual, loop(product, SIZES[sizes], given), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS)
def test_bfloat16(product, small_blocks, interpreted):
    """Summed in float32, over several blocks too, and rounded once."""
    sizes = SIZES["borders-inside"]
    given = arrays(sizes, dtype=jnp.bfloat16)
    actual = run(product, sizes, given)
    assert_close(product, actual, loop(product, sizes, given), 1e-6)
    if product != "outer":
        np.testing.assert_array_equal(run(product, sizes, given, jnp.bfloat16), actual.astype(jnp.bfloat16))


@pytest.mark.slow
def test_other_groups_rows_are_not_touched(small_blocks, interpreted):
    """A group whose rows are not finite spoils its own results only, also in blocks that it shares."""
    sizes = SIZES["borders-inside"]
    given, own = arrays(sizes), slice(100, 400)
    spoilt = {name: x.copy() for name, x in given.items()}
    for name, x in spoilt.items():
        x[1 if name == "w" else own] = np.nan
    for product in PRODUCTS:
        clean, actual = run(product, sizes, given), run(product, sizes, spoilt)
        its = 1 if product == "outer" else own
        assert np.isnan(actual[its]).all()
        np.testing.assert_array_equal(np.delete(actual, its, axis=0), np.delete(clean, its, axis=0))


@pytest.mark.parametrize("dma_execution_mode", ["eager", pytest.param("on_wait", marks=pytest.mark.slow)])
@pytest.mark.parametrize("product", PRODUCTS)
def test_without_races_and_with_unset_memory_nan(product, dma_execution_mode, small_blocks):
    sizes = SIZES["empty-groups"]
    given = arrays(sizes)
    params = pltpu.InterpretParams(
        detect_races=True, on_race="raise", uninitialized_memory="nan", dma_execution_mode=dma_execution_mode
    )
    with pltpu.force_tpu_interpret_mode(params):
        actual = run(product, sizes, given)
    assert_close(product, actual, loop(product, sizes, given), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS)
def test_blocks_as_on_a_tpu(product, interpreted):
    sizes = [1000, 0, 900, 1200, 77]
    given = arrays(sizes, A=256, C=384)
    assert_close(product, run(product, sizes, given), loop(product, sizes, given), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS)
def test_inside_shard_map(product, small_blocks, interpreted):
    """Each device has other sizes."""
    of_devices = [SIZES["borders-inside"], [640, 0, 0, 640]]
    given = [arrays(sizes, seed=seed) for seed, sizes in enumerate(of_devices)]
    operands = [jnp.concatenate([each[name] for each in given]) for name in OPERANDS[product]]
    with jax.set_mesh(make_mesh(MeshConfig(data=2), jax.devices()[:2])):
        # Unchecked, for the interpreter: it multiplies the length of the grid, which varies, by what does not.
        op = jax.shard_map(PRODUCTS[product], in_specs=P("data"), out_specs=P("data"), check_vma=False)
        actual = jax.device_get(
            jax.jit(op)(*jax.device_put((*operands, jnp.asarray(np.concatenate(of_devices))), P("data")))
        )
    expected = [loop(product, sizes, each) for sizes, each in zip(of_devices, given, strict=True)]
    assert_close(product, actual, np.concatenate(expected), 1e-6)


# --- What is computed ---


find_visits = functools.partial(jax.jit, static_argnums=(1, 2, 3))(visits_of)


def rows_of(sizes, R, blocks, least=0):
    """(group, row) of everything that the visits' windows keep, how many rows they compute, and how many visits there
    are and may be."""
    table, count = jax.tree.map(np.asarray, find_visits(jnp.asarray(sizes, jnp.int32), R, blocks, least))
    kept, computed = [], 0
    for group, block, start, end, units in list(zip(*table, strict=True))[: int(count)]:
        position = start // blocks.unit * blocks.unit
        for size in blocks.windows:
            if units & size:
                rows = np.arange(position, position + size * blocks.unit)
                assert rows[-1] < blocks.rows
                kept += [(group, block * blocks.rows + row) for row in rows if start <= row < end]
                position, computed = position + len(rows), computed + len(rows)
    return kept, computed, int(count), len(table.group)


@pytest.mark.parametrize("unit", [1, 2, 4])
@pytest.mark.parametrize(("G", "R"), [(1, 5), (7, 41), (5, 64)])
def test_every_row_once_and_little_more(G, R, unit):
    """Random sizes, some of them 0: all rows in order, each with its own group; a border costs a unit at most."""
    random = np.random.default_rng(unit)
    for _ in range(40):
        sizes = random.multinomial(R, random.dirichlet(np.full(G, 0.4)))
        kept, computed, count, most = rows_of(sizes, R, Blocks(8, unit))
        expected = np.stack([np.repeat(np.arange(G), sizes), np.arange(R)], axis=1)
        np.testing.assert_array_equal(np.asarray(kept), expected)
        borders = np.cumsum(sizes[sizes > 0])[:-1]
        assert computed == -(-R // unit) * unit + unit * np.sum(borders % unit > 0)
        assert count <= most == -(-R // 8) + G - 1


def test_groups_without_rows_are_visited_where_asked():
    _, computed, count, _ = rows_of([0, 5, 0, 0], 5, Blocks(8, 2), least=1)
    assert (computed, count) == (6, 4)
    assert rows_of([0, 5, 0, 0], 5, Blocks(8, 2))[2] == 1


BLOCKS = [(1, "", 128), (128, "", 128), (129, "", 256), (700, "", 1024), (10**6, "TPU7x", 1024), (10**6, "TPU v5", 256)]


@pytest.mark.parametrize(("R", "device_kind", "rows"), BLOCKS)
def test_blocks(R, device_kind, rows):
    assert Blocks.of(R, 128, device_kind) == Blocks(rows, 128)


def test_windows_are_powers_of_two():
    assert Blocks(1024, 128).windows == (8, 4, 2, 1)


def test_parts_fit_at_the_sizes_of_the_model():
    """Columns of both forward products, and the parts of a gradient that read least."""
    assert pallas.parts(3584, 3072, 1024, 2, 4) == 1536 and pallas.parts(3072, 3584, 1024, 2, 4) == 1792
    assert pallas.outer_parts(3584, 3072, 1024, 2) == (1792, 1536)


# --- Errors ---


@pytest.mark.parametrize("product", PRODUCTS)
def test_widths_that_are_not_whole_lanes(product):
    with pytest.raises(ValueError, match="expected widths that are multiples of 128"):
        given = arrays([3, 4], A=100)
        PRODUCTS[product](*(jnp.asarray(given[name]) for name in OPERANDS[product]), jnp.asarray([3, 4]))


def test_a_width_that_does_not_fit():
    shapes = (2048, 2**15), (2, 2**15, 128)
    abstract = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with pytest.raises(ValueError, match="width = 32768: 1024 rows of it"):
        jax.eval_shape(grouped_matmul, *abstract, jax.ShapeDtypeStruct((2,), jnp.int32))


@pytest.mark.parametrize("product", PRODUCTS)
def test_precision_of_products(product):
    """float32 operands ask for full precision, whatever they are sums are float32."""
    for dtype in (np.float32, jnp.bfloat16):
        given = arrays([3, 4], dtype=dtype)
        operands = (given[name] for name in OPERANDS[product])
        jaxpr = jax.make_jaxpr(PRODUCTS[product])(*operands, jnp.asarray([3, 4])).jaxpr
        products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
        assert products
        for e in products:
            assert e.outvars[0].aval.dtype == jnp.float32
            if dtype == np.float32:
                assert e.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


# --- Mistakes ---


def a_block_forgets_what_another_group_wrote(monkeypatch):
    replace(monkeypatch, pallas._matmul, {"jnp.where(mine(found.shape[1]), found, y[rows])": "found"})
    return "matmul"


def a_window_starts_where_a_larger_one_does(monkeypatch):
    replace(monkeypatch, pallas._windows, {" + before)": ")"})
    return "matmul"


def sums_are_not_cleared(monkeypatch):
    changes = {"(v == 0) | (visits.group[v] != visits.group[jnp.maximum(v - 1, 0)])": "v == 0"}
    replace(monkeypatch, pallas._outer, changes)
    return "outer"


def rows_of_others_are_added(monkeypatch):
    replace(monkeypatch, pallas._outer, {"dot(own(x), own(dy), ": "dot(x[rows], dy[rows], "})
    return "outer"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        a_block_forgets_what_another_group_wrote,
        a_window_starts_where_a_larger_one_does,
        sums_are_not_cleared,
        rows_of_others_are_added,
    ],
)
def test_a_mistake_fails(mistake, monkeypatch, small_blocks, interpreted):
    product, sizes = mistake(monkeypatch), SIZES["empty-groups"]  # of which one is a large window and a small one
    given = arrays(sizes)
    with pytest.raises(AssertionError):
        assert_close(product, run(product, sizes, given), loop(product, sizes, given), 1e-6)
