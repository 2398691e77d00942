"""Routed experts: records streamed from HBM, products with four-bit codes, scales applied to sums over 32 inputs.

A product with MXFP4 weights is a sum over groups of 32 inputs, each with a scale per output. So x stands on the
diagonal of a matrix with a row for each group, [groups, inputs], whose product with the codes (exact in FP8) is a sum
per group and output: bfloat16 times code in float32. The scales, powers of two, then multiply exactly.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.config import DecodeConfig, round_up
from pallas_kernels.decode.core import F32, I32, Core
from pallas_kernels.decode.record import CHUNK, GROUP, SCALES
from pallas_kernels.decode.reference import situ

UNROLL = 4  # experts


def copy(core: Core, layer, expert, slot):
    """One record of MoE layer `layer` into VMEM."""
    source = core.weights.experts.at[layer, expert]
    return pltpu.make_async_copy(source, core.buffers.experts.at[slot], core.semaphores.experts.at[slot])


def start(core: Core, layer) -> None:
    """As many of the chosen experts' records as there are slots."""
    count = core.config.rows * core.config.moe.top_k

    @pl.loop(0, min(core.config.blocks.expert_slots, count))
    def _(j):
        copy(core, layer, _pick(core, j), j).start()


def _pick(core: Core, j):
    """Choice j of all rows' k."""
    k = core.config.moe.top_k
    return core.scalars.chosen[lax.div(j, k), lax.rem(j, k)]


def finish(core: Core, layer, z):
    """This rank's part of sum_j p_j w2_j SiTU(w1_j z, w3_j z), z [B, L]: [B, L] in float32."""
    c, record = core.config, core.plan.record
    row_of = lax.broadcasted_iota(I32, (c.rows, 1), 0)

    @pl.loop(0, c.rows)
    def _(row):
        mine = z if c.rows == 1 else jnp.sum(jnp.where(row_of == row, z, 0.0), axis=0, keepdims=True)
        diagonals = _diagonals(c, mine.astype(c.dtype))

        def one(i, total):
            return total + core.scalars.weights[row, i] * _expert(core, layer, row * c.moe.top_k + i, diagonals)

        # Several experts in one block of code, since each is a chain of products; groups are added up at last.
        total = jnp.zeros((SCALES * record.down_scale_rows, c.moe.latent), F32)
        total = lax.fori_loop(0, c.moe.top_k, one, total, unroll=UNROLL)
        core.buffers.routed[pl.ds(row, 1), :] = jnp.sum(total, axis=0, keepdims=True)

    return core.buffers.routed[...]


def _expert(core: Core, layer, j, diagonals: list):
    """Choice j of all rows: w2 SiTU(w1 z, w3 z) by groups of hidden channels, [groups, L]. Its slot is filled anew if
    there are more choices than slots."""
    c, slots = core.config, core.config.blocks.expert_slots
    slot, count = lax.rem(j, slots), c.rows * c.moe.top_k
    copy(core, layer, _pick(core, j), slot).wait()
    words = core.buffers.experts.at[slot]
    hidden = _up(core, words, diagonals)
    gate, up = hidden[:, : core.plan.record.expert], hidden[:, core.plan.record.expert :]
    y = _down(core, words, situ(gate, up, c.situ_beta, c.situ_linear_beta).astype(c.dtype))
    if count > slots:

        @pl.when(j + slots < count)
        def _():
            copy(core, layer, _pick(core, j + slots), slot).start()

    return y


def _diagonals(c: DecodeConfig, z) -> list:
    """`_diagonal` of each `expert_columns` of z [1, L]."""
    columns = c.blocks.expert_columns
    return [_diagonal(z[:, start : start + columns]) for start in range(0, c.moe.latent, columns)]


def _up(core: Core, words, diagonals: list):
    """Gate and up: [1, 2F]."""
    c, record = core.config, core.plan.record
    columns, inputs = c.blocks.expert_columns, GROUP * SCALES * CHUNK
    total = None
    for number, x in enumerate(diagonals):
        start = number * columns
        codes = _values(c, words[: record.up_rows, start : start + columns])
        dimensions = (((1,), (1,)), ((), ()))
        sums = lax.dot_general(x, codes, dimensions, precision=c.precision, preferred_element_type=F32)
        places = [record.chunk_at((start + k) // inputs) for k in range(0, columns, inputs)]
        scales = [_scales(words[row : row + CHUNK, lane : lane + 2 * record.expert]) for row, lane in places]
        term = sums[: columns // GROUP] * _stacked(scales)
        total = term if total is None else total + term
    return jnp.sum(total, axis=0, keepdims=True)


def _down(core: Core, words, hidden):
    """w2 for hidden [1, F], by groups of 32 hidden channels: [groups, L]."""
    record = core.plan.record
    top = record.up_rows + round_up(record.down_rows, 8)  # whole tiles; what follows the codes is cut off again
    codes = _values(core.config, words[record.up_rows : top, :])[: record.expert]
    sums = jnp.dot(_diagonal(hidden), codes, precision=core.config.precision, preferred_element_type=F32)
    start, rows = record.down_scale_start, record.down_scale_rows
    return sums[: SCALES * rows] * _scales(words[start : start + rows, :])


def _stacked(parts: list):
    return jnp.concatenate(parts, axis=0) if len(parts) > 1 else parts[0]


def _values(c: DecodeConfig, words):
    """int32 [R, lanes] -> the codes' values [8 R, lanes], exact in FP8: the matrix unit multiplies it with bfloat16."""
    codes = pltpu.bitcast(words, jnp.float4_e2m1fn).astype(jnp.float8_e4m3fn)
    return codes.astype(F32) if c.dtype == F32 else codes


def _scales(words):
    """The E8M0 bytes of int32 [R, lanes] as float32 [4 R, lanes]."""
    bits = pltpu.bitcast(words, jnp.uint8).astype(I32)
    return lax.bitcast_convert_type(lax.shift_left(bits, jnp.full_like(bits, 23)), F32)


def _diagonal(x):
    """[1, n] bfloat16 -> [groups, n]: row i holds x in its i-th 32 columns; rows of zeros up to a whole tile."""
    groups = x.shape[1] // GROUP
    shape = (max(groups, 16), x.shape[1])
    here = lax.broadcasted_iota(I32, shape, 0) == lax.div(lax.broadcasted_iota(I32, shape, 1), GROUP)
    return jnp.where(here, jnp.broadcast_to(x, shape), jnp.zeros((), x.dtype))
