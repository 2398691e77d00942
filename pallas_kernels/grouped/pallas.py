"""Grouped matrix products on a TPU core.

The contracted width is whole in VMEM, so a product is not summed over steps, and columns are cut instead. A group's
weights stay while its blocks of rows pass. Gradients of weights are summed in VMEM over the blocks of a group.
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.dispatch import device_kind
from pallas_kernels.common.kernels import COLUMNS_BY_ROWS, LANES, ROWS_BY_COLUMNS, ROWS_BY_ROWS, cost_of, dot, shape_of
from pallas_kernels.grouped.visits import Blocks, Visits, visits_of

BLOCK_BYTES, VMEM_BYTES = 48 * 2**20, 56 * 2**20  # of the blocks of a step, twice; of a kernel
# The matrix unit is 256 deep and wide. Fewer rows than that cost as much where they are what is contracted, or where
# the weights are transposed while they are loaded.
UNIT, DEEP_UNIT = 128, 256


class Product(NamedTuple):
    """x [R, A] times one axis of each w [G, ., .], for windows of so many rows or more."""

    contract: tuple[tuple[int, ...], tuple[int, ...]]
    unit: int

    @property
    def kept(self) -> int:
        """The axis of w [G, ., .] that stays."""
        return 2 - self.contract[1][0]


FORWARD, TRANSPOSED = Product(ROWS_BY_COLUMNS, UNIT), Product(ROWS_BY_ROWS, DEEP_UNIT)


def matmul(
    product: Product, x: Float[Array, "R A"], w: Float[Array, "G _ _"], sizes: Int[Array, " G"], dtype: DTypeLike
) -> Float[Array, "R C"]:
    (R, A), C, kept = x.shape, w.shape[product.kept], product.kept
    blocks = Blocks.of(R, product.unit, device_kind())
    c = parts(A, C, blocks.rows, x.dtype.itemsize, jnp.dtype(dtype).itemsize)
    visits, count = visits_of(sizes, R, blocks)
    part = (1, A, c) if kept == 2 else (1, c, A)
    return _call(
        functools.partial(_matmul, product, blocks), "grouped_matmul", (C // c, count), visits, (x, w),
        in_specs=[
            _spec((blocks.rows, A), lambda j, v, s: (s.block[v], 0)),
            _spec(part, lambda j, v, s: (s.group[v], 0, j) if kept == 2 else (s.group[v], j, 0)),
        ],
        out_spec=_spec((blocks.rows, c), lambda j, v, s: (s.block[v], j)),
        out_shape=shape_of((R, C), dtype, x),
    )  # fmt: skip


def outer(x: Float[Array, "R A"], dy: Float[Array, "R C"], sizes: Int[Array, " G"]) -> Float[Array, "G A C"]:
    (R, A), C, G = x.shape, dy.shape[1], sizes.shape[0]
    blocks = Blocks.of(R, DEEP_UNIT, device_kind())
    a, c = outer_parts(A, C, blocks.rows, x.dtype.itemsize)
    visits, count = visits_of(sizes, R, blocks, least=1)
    return _call(
        functools.partial(_outer, blocks), "grouped_outer", (A // a, C // c, count), visits, (x, dy),
        in_specs=[
            _spec((blocks.rows, a), lambda i, j, v, s: (s.block[v], i)),
            _spec((blocks.rows, c), lambda i, j, v, s: (s.block[v], j)),
        ],
        out_spec=_spec((1, a, c), lambda i, j, v, s: (s.group[v], i, j)),
        out_shape=shape_of((G, A, C), jnp.float32, x),
    )  # fmt: skip


def _cuts(width: int) -> list[int]:
    """Equal parts of whole lane tiles, largest first."""
    return [width // n for n in range(1, width // LANES + 1) if width % (n * LANES) == 0]


def parts(A: int, C: int, rows: int, size: int, out_size: int) -> int:
    """As many columns of w [A, C] as fit with a block of rows. Raises ValueError if none do."""
    fits = lambda c: 2 * ((rows + c) * A * size + rows * c * out_size) <= BLOCK_BYTES  # noqa: E731
    c = next(filter(fits, _cuts(C)), None)
    if c is None:
        raise ValueError(f"width = {A}: {rows} rows of it and a part of w [{A}, {C}] do not fit in VMEM")
    return c


def outer_parts(A: int, C: int, rows: int, size: int) -> tuple[int, int]:
    """The parts of A and of C that fit: x is read again for every part of C, dy for every part of A."""
    fits = lambda a, c: 2 * (a * c * 4 + rows * (a + c) * size) <= BLOCK_BYTES  # noqa: E731
    read = lambda cut: C * (A // cut[0]) + A * (C // cut[1])  # noqa: E731
    return min((cut for cut in itertools.product(_cuts(A), _cuts(C)) if fits(*cut)), key=read)


def _spec(shape: tuple[int, ...], index: Callable) -> pl.BlockSpec:
    """`index` is called with the indices of the grid and the visits."""
    prefetched = len(Visits._fields)
    return pl.BlockSpec(shape, lambda *args: index(*args[:-prefetched], Visits(*args[-prefetched:])))


def _call(kernel, name: str, grid, visits: Visits, arrays, *, in_specs, out_spec, out_shape) -> Array:
    (R, A), C = arrays[0].shape, out_shape.shape[-1]  # both kernels multiply R A C times
    semantics = ("parallel",) * (len(grid) - 1) + ("arbitrary",)
    run = pl.pallas_call(
        kernel,
        name=name,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits), grid=grid, in_specs=in_specs, out_specs=out_spec
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=cost_of(2 * R * A * C, (*arrays, out_shape)),
    )
    return run(*visits, *arrays)


def _windows(blocks: Blocks, visits: Visits, v, work: Callable) -> None:
    """work(rows, mine) for every window of visit v: mine(width) says which of its rows are the group's."""
    start, end, units = visits.start[v], visits.end[v], visits.units[v]
    for size in blocks.windows:
        rows = size * blocks.unit

        @pl.when((units & size) != 0)
        def _(size=size, rows=rows):
            before = units // (2 * size) * (2 * size)  # units of larger windows
            first = pl.multiple_of((start // blocks.unit + before) * blocks.unit, blocks.unit)

            def mine(width: int):
                row = first + jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0)
                return (row >= start) & (row < end)

            work(pl.ds(first, rows), mine)


def _matmul(product: Product, blocks: Blocks, *refs):
    visits, (x, w, y) = Visits(*refs[:-3]), refs[-3:]

    def work(rows, mine):
        found = dot(x[rows], w[0], product.contract).astype(y.dtype)
        y[rows] = jnp.where(mine(found.shape[1]), found, y[rows])

    _windows(blocks, visits, pl.program_id(1), work)


def _outer(blocks: Blocks, *refs):
    visits, (x, dy, dw), v = Visits(*refs[:-3]), refs[-3:], pl.program_id(2)

    @pl.when((v == 0) | (visits.group[v] != visits.group[jnp.maximum(v - 1, 0)]))
    def _():
        dw[...] = jnp.zeros_like(dw)

    def work(rows, mine):
        def own(z):  # also where rows of others are not finite
            return jnp.where(mine(z.shape[1]), z[rows].astype(jnp.float32), 0).astype(z.dtype)

        dw[0] += dot(own(x), own(dy), COLUMNS_BY_ROWS)

    _windows(blocks, visits, v, work)
