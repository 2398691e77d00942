"""What the forward and the backward kernel share: their grid, which block of each array a step sees, and its masks."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.common.kernels import LANES, LOG2E
from pallas_kernels.kda import tiles
from pallas_kernels.kda.gate import activate
from pallas_kernels.kda.steps import CHUNK, Steps
from pallas_kernels.kda.tiles import Products, Pullback, iota

# Heads may run on both cores of a chip that has two; the default limit of 16 MiB is a quarter of the smallest VMEM.
COMPILER_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=48 * 2**20)


@dataclass(frozen=True)
class Problem:
    """One call, static. H key heads, HV value heads, of K and V channels (multiples of 128).

    `bound` is the gate's lower bound in natural logarithm, None for any gate; `masked` whether rows can be padding.
    """

    H: int
    HV: int
    K: int
    V: int
    scale: float
    bound: float | None
    masked: bool
    states: int
    has_initial: bool
    has_order: bool
    has_gate: bool

    @property
    def group(self) -> int:
        return self.HV // self.H

    def heads_per_step(self, limit: int) -> int:
        """The most value heads of a step: they share whole key heads, or are part of one key head's group."""
        for heads in range(min(limit, self.HV), 0, -1):
            whole = heads % self.group == 0 or self.group % heads == 0
            if self.HV % heads == 0 and whole and (self.HV <= LANES or LANES % heads == 0):
                return heads
        raise AssertionError("one head always fits")

    def key_head(self, h: int, heads: int) -> int:
        """The key head of value head h of a step, within the step's block."""
        return h // self.group if heads >= self.group else 0


def forward_flops(K: int, V: int) -> int:
    """Of the matrix products, per token and value head, in chunks of C tokens: 6 K V + 4 C (K + V) + C^2."""
    return 6 * K * V + 4 * CHUNK * (K + V) + CHUNK**2


def backward_flops(K: int, V: int) -> int:
    """Likewise, with what is computed again inside a chunk: 14 K V + 10 C (K + V)."""
    return 14 * K * V + 10 * CHUNK * (K + V)


class Specs:
    """Blocks of `heads` value heads; the grid is (block of heads, step), the steps are prefetched scalars."""

    def __init__(self, problem: Problem, heads: int):
        p, group = problem, problem.group
        self.heads = heads
        self.key = self.rows(max(1, heads // group) * p.K, lambda h: h if heads >= group else h * heads // group)
        self.value, self.gate = self.rows(heads * p.V), self.rows(heads * p.K)
        self.beta = self.rows(min(p.HV, LANES), lambda h: h * heads // LANES)
        self.order = pl.BlockSpec((1, 1, 2, CHUNK), lambda h, m, s: (*self._chunk(s, m), 0, 0))
        self.state = pl.BlockSpec((1, heads, p.K, p.V), lambda h, m, s: (self._field(s, m, "slot"), h, 0, 0))
        self.rates = pl.BlockSpec((2, heads * p.K), lambda h, m, s: (0, h))
        self.beta_gradient = pl.BlockSpec((1, 1, CHUNK, heads), lambda h, m, s: (h, *self._chunk(s, m), 0))

    @staticmethod
    def _field(scalars, m, name: str):
        return scalars[Steps._fields.index(name), m]

    def _chunk(self, scalars, m):
        return self._field(scalars, m, "row"), self._field(scalars, m, "chunk")

    def rows(self, width: int, of_head=lambda h: h) -> pl.BlockSpec:
        return pl.BlockSpec((1, CHUNK, width), lambda h, m, s: (*self._chunk(s, m), of_head(h)))

    def saved(self, rows: int, columns: int, step) -> pl.BlockSpec:
        """Of an array with one matrix per step and head; `step(m)` is the forward's number of a grid step."""
        return pl.BlockSpec((1, self.heads, rows, columns), lambda h, m, s: (step(m), h, 0, 0))


class Masks(NamedTuple):
    """Which rows are live, and which pairs of rows, rows and entry, rows and end belong to one segment."""

    live: Array  # [C, 1]
    fresh: Array  # scalar: this is the chunk's first visit
    same: Array | None  # [C, C]; None: one segment
    entry: Array | None  # [C, 1]
    last: Array | None  # [C, 1]
    keep: Array | None  # scalar: the chunk's last segment is the one at its entry


def masks_of(order, steps: Steps, m) -> Masks:
    """`order`, a block [1, 1, 2, C] or None: per token the number of its segment, and 1 where it is live."""
    rows = iota(0, (CHUNK, 1))
    live, fresh = (rows >= steps.begin[m]) & (rows < steps.end[m]), steps.fresh[m] == 1
    if order is None:
        return Masks(live, fresh, None, None, None, None)
    number, is_live = (jnp.broadcast_to(order[0, 0, i : i + 1].astype(jnp.float32), (CHUNK, CHUNK)) for i in (0, 1))
    across = number.T
    entry, last = (across[:, :1] == x[m].astype(jnp.float32) for x in (steps.entry, steps.last))
    return Masks(live & (is_live.T[:, :1] > 0), fresh, across == number, entry, last, steps.entry[m] == steps.last[m])


def keep_live(masks: Masks | None, *arrays):
    """Zeros in padding, by selection: it may hold NaN."""
    return arrays if masks is None else tuple(jnp.where(masks.live, x, jnp.zeros_like(x)) for x in arrays)


def write_live(masks: Masks | None, ref, index, x) -> None:
    """Rows of a chunk that is visited several times; rows that nobody writes become zero."""
    if masks is not None:
        x = jnp.where(masks.live, x, jnp.where(masks.fresh, jnp.zeros_like(x), ref[index]))
    ref[index] = x


def column(x: Float[Array, "C N"], index) -> Float[Array, "C 128"]:
    """Column `index` in all lanes."""
    x = jnp.concatenate([x, jnp.zeros((CHUNK, LANES - x.shape[1]), x.dtype)], axis=1) if x.shape[1] < LANES else x
    return jnp.take_along_axis(x, jnp.full(x.shape, index, jnp.int32), axis=1)


class Chunk(NamedTuple):
    """One head's inputs in float32, and what they give without the state. P and L are masked; L is without beta."""

    q: Float[Array, "C K"]
    k: Float[Array, "C K"]
    g: Float[Array, "C K"]
    beta: Float[Array, "C 128"]
    products: Products
    pullback: Pullback


def load_chunk(problem: Problem, masks: Masks | None, q, k, g, rates, beta, dtype) -> Generator[None, None, Chunk]:
    """`g` are logits if `rates` [2, K] (rate and bias of the gate) are there; `beta` [C, 128] in all lanes."""
    g = g.astype(jnp.float32)
    g = g if rates is None else activate(g, rates[:1], rates[1:], problem.bound)
    q, k, g, beta = keep_live(masks, *(x.astype(jnp.float32) for x in (q, k, g, beta)))
    if problem.bound is None:
        products, pullback = yield from tiles.products_any(q, k, g * LOG2E, dtype)
    else:
        products, pullback = yield from tiles.products_bounded(q, k, g * LOG2E, problem.bound * LOG2E, dtype)
    yield
    row, col = iota(0), iota(1)
    products = products._replace(P=jnp.where(col <= row, products.P, 0.0), L=jnp.where(col < row, products.L, 0.0))
    if masks is not None and masks.same is not None:
        x, zero = products, jnp.zeros_like(products.q_in)
        products = Products(
            P=jnp.where(masks.same, x.P, 0.0),
            L=jnp.where(masks.same, x.L, 0.0),
            q_in=jnp.where(masks.entry, x.q_in, zero),
            k_in=jnp.where(masks.entry, x.k_in, zero),
            k_out=jnp.where(masks.last, x.k_out, zero),
            decay=jnp.where(masks.keep, x.decay, 0.0),
        )
    return Chunk(q, k, g, beta, products, pullback)
