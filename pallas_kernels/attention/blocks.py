"""What the forward and the backward kernel share: sizes, how arrays are cut into blocks, and scores of a tile.

Two heads make a step, so that every block is a whole number of lanes: the extra part of a query is half a lane tile
wide. A query is [nope | extra of both heads] and a key [nope | extra, in its head's half], both N + 128 wide, as deep
as the matrix unit. Scores stand transposed, [keys, queries]: the maximum and the sum over keys are then elementwise,
and what belongs to a query is a row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.attention.steps import field
from pallas_kernels.common.kernels import LANES

HEADS = 2
HALF = LANES // HEADS
TILE = 256  # queries or keys that are worked on together
NEGATIVE = -1e30  # finite: a query without keys gives 0 and not NaN


@dataclass(frozen=True)
class Problem:
    """One call, static: N, V widths of keys and values (multiples of 128), `block` of queries and of keys."""

    N: int
    V: int
    scale: float
    block: int
    has_segments: bool

    def tiles(self, size: int = TILE) -> list[slice]:
        size = next(x for x in (size, TILE, LANES) if self.block % x == 0)
        return [slice(i, i + size) for i in range(0, self.block, size)]


def forward_flops(key: int, V: int) -> int:
    """Of the matrix products, per pair of a query and a key that attend, and head."""
    return 2 * (key + V)


def backward_flops(key: int, V: int) -> int:
    """Likewise, scores computed again."""
    return 2 * (3 * key + 2 * V)


def causal_pairs(T: int, S: int) -> int:
    """Of T queries and S keys: exact if they are the same tokens, else the mean over the places of the queries."""
    return T * (S + 1) // 2


class Inputs(NamedTuple):
    """Arrays of a call, or their blocks in a step; Hp pairs of heads. `extra` is [k_pe | 0 | 0 | k_pe]. Both segments
    are those of the row."""

    q_nope: Float[Array, "B T HpN2"]
    q_pe: Float[Array, "B T HpR2"]
    kv: Float[Array, "B S HpNV2"]
    extra: Float[Array, "B S 256"]
    q_segment: Int[Array, "B 1 S"] | None
    k_segment: Int[Array, "B 1 S"] | None

    def query(self, problem: Problem, h: int, rows: slice) -> Float[Array, "t NR"]:
        """In a step: of head h of the pair."""
        nope = self.q_nope[0, rows, h * problem.N : (h + 1) * problem.N]
        return jnp.concatenate([nope, self.q_pe[0, rows]], axis=1)

    def key(self, problem: Problem, h: int, rows: slice) -> Float[Array, "t NR"]:
        start = h * (problem.N + problem.V)
        return jnp.concatenate(
            [self.kv[0, rows, start : start + problem.N], self.extra[0, rows, h * LANES : (h + 1) * LANES]], axis=1
        )

    def value(self, problem: Problem, h: int, rows: slice) -> Float[Array, "t V"]:
        end = (h + 1) * (problem.N + problem.V)
        return self.kv[0, rows, end - problem.V : end]


def split_refs(problem: Problem, refs: tuple) -> tuple[Inputs, tuple]:
    """A kernel's references: the inputs that there are, and the others."""
    count = len(Inputs._fields) if problem.has_segments else len(Inputs._fields) - 2
    return Inputs(*refs[:count], *(None,) * (len(Inputs._fields) - count)), refs[count:]


class Scalars(NamedTuple):
    """Prefetched. `offset`: which block of the row the first block of queries is."""

    steps: Int32[Array, "B M"]
    offset: Int32[Array, "1"]

    def distance(self, step, block: int):
        """How many tokens the queries of a step are after its keys."""
        return (field(step, "q") + self.offset[0] - field(step, "k")) * block


class Specs:
    """Blocks of the grid (row, pair of heads, step)."""

    def __init__(self, problem: Problem):
        p = problem
        self.block = p.block
        self.inputs = Inputs(
            q_nope=self.rows("q", HEADS * p.N),
            q_pe=self.rows("q", LANES),
            kv=self.rows("k", HEADS * (p.N + p.V)),
            extra=pl.BlockSpec((1, p.block, HEADS * LANES), lambda b, h, m, s, o: (b, field(s[b, m], "k"), 0)),
            q_segment=pl.BlockSpec((1, 1, p.block), lambda b, h, m, s, o: (b, 0, field(s[b, m], "q") + o[0])),
            k_segment=pl.BlockSpec((1, 1, p.block), lambda b, h, m, s, o: (b, 0, field(s[b, m], "k"))),
        )

    def rows(self, of: str, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.block, width), lambda b, h, m, s, o: (b, field(s[b, m], of), h))

    def rows_of_span(self, span: int, width: int) -> pl.BlockSpec:
        """Of arrays of `span` blocks of queries: the block that is written in this step or a later one. It is the keys'
        of the step or, while keys before the span pass, the first one, whose number is a multiple of `span`; after
        them it stays the last one."""

        def index(b, h, m, s, o):
            q, k = (field(s[b, m], name) for name in ("q", "k"))
            return b, jnp.clip(k - o[0] - q // span * span, 0, span - 1), h

        return pl.BlockSpec((1, self.block, width), index)

    def statistics(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, 8, self.block), lambda b, h, m, s, o: (b, h, 0, field(s[b, m], "q")))


def allowed(inputs: Inputs, distance, queries: slice, keys: slice) -> Array:
    """[keys, queries]: which pairs attend. `distance` is how many tokens the first query is after the first key."""
    shape = keys.stop - keys.start, queries.stop - queries.start
    key, query = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    pairs = query + (queries.start - keys.start) + distance >= key
    if inputs.q_segment is None:
        return pairs
    of_query = inputs.q_segment[0, :, queries]
    of_key = jnp.broadcast_to(inputs.k_segment[0, :, keys], (LANES, shape[0])).T[:, :1]
    return pairs & (of_key == of_query) & (of_query >= 0)
