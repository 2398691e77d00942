"""Routed experts: records streamed from HBM, products with four-bit codes, scales applied to sums over 32 inputs.

A product with MXFP4 weights is a sum over groups of 32 inputs, each with a scale per output. So x stands on the
diagonal of a matrix with a row for each group, [groups, inputs], whose product with the codes (exact in FP8) is a sum
per group and output: bfloat16 times code in float32. The scales, powers of two, then multiply exactly.
"""

import itertools
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.config import DecodeConfig, round_up
from pallas_kernels.decode.core import F32, I32, Core, joined
from pallas_kernels.decode.record import GROUP, OUTPUTS, QUARTERS, SCALES, STRETCH, Record
from pallas_kernels.decode.reference import situ


def copy(core: Core, layer, expert, slot):
    """One record of MoE layer `layer` into VMEM."""
    source = core.weights.experts.at[layer, expert]
    return pltpu.make_async_copy(source, core.buffers.experts.at[slot], core.semaphores.experts.at[slot])


def start(core: Core, layer) -> None:
    """As many of the chosen experts' records as there are slots."""
    count = core.config.rows * core.config.moe.top_k

    for j in range(min(core.config.blocks.expert_slots, count)):
        copy(core, layer, _pick(core, j), j).start()


def _pick(core: Core, j):
    """Choice j of all rows' k."""
    j, k = jnp.int32(j), core.config.moe.top_k
    return core.scalars.chosen[lax.rem(j, k), lax.div(j, k)]


def finish(core: Core, layer, z):
    """This rank's part of sum_j p_j w2_j SiTU(w1_j z, w3_j z), z [B, L]: [B, L] in float32."""
    c, plan = core.config, core.plan
    row_of = lax.broadcasted_iota(I32, (c.rows, 1), 0)

    @pl.loop(0, c.rows)
    def _(row):
        mine = z if c.rows == 1 else jnp.sum(jnp.where(row_of == row, z, 0.0), axis=0, keepdims=True)
        diagonals = _diagonals(core, mine.astype(c.dtype))
        hands = [_Hand(core, layer, row, first, plan.hand) for first in range(0, c.moe.top_k, plan.hand)]
        total = jnp.zeros((plan.hand * SCALES * plan.record.down_scale_rows, c.moe.latent), F32)
        columns = hands[0].up(diagonals)
        for hand, following in itertools.zip_longest(hands, hands[1:]):
            # First the next hand's way up: it keeps the matrix unit busy while this one's sums wait for each other.
            ahead = following.up(diagonals) if following else None
            total = total + hand.down(columns)
            columns = ahead
        core.buffers.routed[pl.ds(row, 1), :] = jnp.sum(total, axis=0, keepdims=True)

    return core.buffers.routed[...]


@dataclass(frozen=True)
class _Hand:
    """Experts `first` to `first` + `size` - 1 of a row's choice."""

    core: Core
    layer: object
    row: object
    first: int
    size: int

    @property
    def choices(self) -> list:
        return [self.row * self.core.config.moe.top_k + self.first + i for i in range(self.size)]

    @property
    def words(self) -> list:
        slots = self.core.config.blocks.expert_slots
        return [self.core.buffers.experts.at[lax.rem(j, slots)] for j in self.choices]

    def up(self, diagonals: list) -> list:
        """(w1, w3) z by groups of inputs, once the records are there: see `_up`."""
        core = self.core
        for j in self.choices:
            copy(core, self.layer, _pick(core, j), lax.rem(j, core.config.blocks.expert_slots)).wait()
        return _up(core, self.words, diagonals)

    def down(self, columns: list):
        """p w2 SiTU(w1 z, w3 z) by experts and groups of hidden channels: [size groups, L]. The slots are filled anew
        if there are more choices than slots."""
        core, c, F = self.core, self.core.config, self.core.plan.record.expert
        up = _summed(columns, self.size)
        hidden = [situ(x[:, :F], x[:, F:], c.situ_beta, c.situ_linear_beta).astype(c.dtype) for x in up]
        y = _down(core, self.words, hidden)
        expert = lax.div(lax.broadcasted_iota(I32, (len(y), 1), 0), len(y) // self.size)
        p = core.scalars.weights
        weight = sum(jnp.where(expert == i, p[self.first + i, self.row], 0.0) for i in range(self.size))
        if c.rows * c.moe.top_k > c.blocks.expert_slots:
            for j in self.choices:
                _refill(core, self.layer, j)
        return weight * y


def _refill(core: Core, layer, j) -> None:
    following = j + core.config.blocks.expert_slots

    @pl.when(following < core.config.rows * core.config.moe.top_k)
    def _():
        copy(core, layer, _pick(core, following), lax.rem(j, core.config.blocks.expert_slots)).start()


def _diagonals(core: Core, z) -> list:
    """Per stretch of the record what multiplies it from the left, [QUARTERS * rows of groups, 2F]: for each quarter of
    the inputs and each group the inputs of this group, and zeros."""
    record = core.plan.record
    rows, quarter = 2 * record.expert, record.quarter
    quarters = [z[:, i * quarter : (i + 1) * quarter] for i in range(QUARTERS)]
    made = []
    for stretch in range(record.stretches):
        start = rows * stretch % quarter
        piles = [jnp.concatenate([x] * (2 + rows // quarter), axis=1)[:, start : start + rows] for x in quarters]
        made.append(joined([_diagonal(x, round_up(record.groups, 8)) for x in piles], 0))
    return made


def _up(core: Core, words: list, diagonals: list) -> list:
    """Gate and up of some experts, by groups of inputs: of each 64 outputs [groups, 256 lanes per expert]."""
    c, record = core.config, core.plan.record
    columns = [None] * record.columns
    for stretch, x in enumerate(diagonals):
        lanes = slice(stretch * STRETCH, (stretch + 1) * STRETCH)
        codes = joined([_values(c, w[: record.up_rows, lanes]) for w in words], 1)
        scales = joined([_scales(w[record.up_scale_start : record.down_scale_start, lanes]) for w in words], 1)
        sums = jnp.dot(x, codes, precision=c.precision, preferred_element_type=F32)
        term = _own_quarter(sums)[: len(scales)] * scales
        row = lax.broadcasted_iota(I32, term.shape, 0)
        for column, first, last in _columns(record, stretch):
            part = term if (first, last) == (0, record.groups) else jnp.where((row >= first) & (row < last), term, 0.0)
            columns[column] = part if columns[column] is None else columns[column] + part
    return columns


def _summed(columns: list, experts: int) -> list:
    """Of each expert [1, 2F]."""
    columns = [jnp.sum(column, axis=0, keepdims=True) for column in columns]
    return [joined([_folded(x, i * STRETCH) for x in columns], 1) for i in range(experts)]


def _folded(x, lane: int):
    """The sum over the quarters of the inputs, [1, 64], of one expert's 256 lanes."""
    return sum(x[:, lane + i * OUTPUTS : lane + (i + 1) * OUTPUTS] for i in range(QUARTERS))


def _columns(record: Record, stretch: int):
    """(column, first, last group) of the columns of outputs that a stretch of the pile has rows of."""
    start, per_column = record.groups * stretch, record.quarter // GROUP
    for column in range(start // per_column, (start + record.groups - 1) // per_column + 1):
        first, last = column * per_column - start, (column + 1) * per_column - start
        yield column, max(first, 0), min(last, record.groups)


def _own_quarter(sums):
    """[QUARTERS * R, lanes] -> [R, lanes]: in the lanes of a quarter the rows that hold its inputs."""
    R = len(sums) // QUARTERS
    quarter = lax.div(lax.rem(lax.broadcasted_iota(I32, (R, sums.shape[1]), 1), STRETCH), OUTPUTS)
    picked = sums[:R]
    for i in range(1, QUARTERS):
        picked = jnp.where(quarter == i, sums[i * R : (i + 1) * R], picked)
    return picked


def _down(core: Core, words: list, hidden: list):
    """w2 of some experts for hidden [1, F] of each, by experts and groups of 32 hidden channels: [experts groups, L].

    The experts' codes stand one below the other, and so do their inputs along the diagonal.
    """
    c, record = core.config, core.plan.record
    F, groups = record.expert, SCALES * record.down_scale_rows
    top = record.up_rows + round_up(record.down_rows, 8)  # whole tiles; what follows the codes is cut off again
    codes = joined([_values(c, w[record.up_rows : top, :])[:F] for w in words], 0)
    start, rows = record.down_scale_start, record.down_scale_rows
    scales = joined([_scales(w[start : start + rows, :]) for w in words], 0)
    x = jnp.broadcast_to(joined(hidden, 1), (round_up(len(scales), 16), F * len(words)))
    row, column = (lax.broadcasted_iota(I32, x.shape, axis) for axis in (0, 1))
    here = row == groups * lax.div(column, F) + lax.div(lax.rem(column, F), GROUP)
    x = jnp.where(here, x, jnp.zeros((), x.dtype))
    sums = jnp.dot(x, codes, precision=c.precision, preferred_element_type=F32)
    return sums[: len(scales)] * scales


def _values(c: DecodeConfig, words):
    """int32 [R, lanes] -> the codes' values [8 R, lanes], exact in FP8: the matrix unit multiplies it with bfloat16."""
    codes = pltpu.bitcast(words, jnp.float4_e2m1fn).astype(jnp.float8_e4m3fn)
    return codes.astype(F32) if c.dtype == F32 else codes


def _scales(words):
    """The E8M0 bytes of int32 [R, lanes] as float32 [4 R, lanes]."""
    bits = pltpu.bitcast(words, jnp.uint8).astype(I32)
    return lax.bitcast_convert_type(lax.shift_left(bits, jnp.full_like(bits, 23)), F32)


def _diagonal(x, rows: int):
    """[1, n] -> [rows, n]: row i holds x in its i-th 32 columns."""
    shape = (rows, x.shape[1])
    here = lax.broadcasted_iota(I32, shape, 0) == lax.div(lax.broadcasted_iota(I32, shape, 1), GROUP)
    return jnp.where(here, jnp.broadcast_to(x, shape), jnp.zeros((), x.dtype))
