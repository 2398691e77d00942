"""The router's choice: k experts per row, the lowest index first among equals, and their weights; both into SMEM.

Experts are compared with each other: how many come before one is its place. That is no more arithmetic than taking the
best k times, and no chain of k reductions over lanes, each of which waits for the one before.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.config import LANES, round_up
from pallas_kernels.decode.core import F32, I32, LOWEST, Core, joined, pad_lanes

HIGHEST = lax.Precision.HIGHEST


def choose(core: Core, logits, bias):
    """Top k of sigmoid(logits) + bias (logits [B, E], bias [1, E]) into SMEM, [place, row]. Returns what `weigh` takes:
    the experts' records are on their way meanwhile."""
    c = core.config.moe
    E = round_up(c.experts, LANES)
    p = pad_lanes(jax.nn.sigmoid(logits), E)
    real = lax.broadcasted_iota(I32, p.shape, 1) < c.experts
    scores = jnp.where(real, p + pad_lanes(bias, E), LOWEST)
    picks = [best(c.top_k, scores[row : row + 1], p[row : row + 1], len(core.buffers.chosen)) for row in range(len(p))]
    indices, weights = zip(*picks, strict=True)
    _to_scalars(core, "chosen", jnp.minimum(_side_by_side(indices), c.experts - 1))
    return weights


def weigh(core: Core, weights) -> None:
    """Their weights into SMEM: p, which the bias never enters (report Eq. 13)."""
    c = core.config.moe
    if c.renormalize:
        weights = [p / (jnp.sum(p, axis=0, keepdims=True) + 1e-20) for p in weights]
    _to_scalars(core, "weights", _side_by_side(weights) * c.scale)


def _side_by_side(columns):
    """[places, 1] of every row -> [places, 128]."""
    lane = lax.broadcasted_iota(I32, (len(columns[0]), LANES), 1)
    return sum(jnp.where(lane == row, column, jnp.zeros((), column.dtype)) for row, column in enumerate(columns))


def _to_scalars(core: Core, name: str, values) -> None:
    buffer = getattr(core.buffers, name)
    buffer[...] = values
    copy = pltpu.make_async_copy(buffer, getattr(core.scalars, name), core.semaphores.scalars.at[0])
    copy.start()
    copy.wait()


def best(k: int, scores, p, rows: int):
    """Of one row [1, E]: indices and p of the k best in the order of their places, [rows, 1] each."""
    index = lax.broadcasted_iota(I32, scores.shape, 1).astype(F32)
    if scores.shape[1] > LANES:
        scores, index, p = _of_best_lanes(k, scores, index, p)
    j = lax.broadcasted_iota(I32, (rows, scores.shape[1]), 0)
    here = (places(scores, index) == j) & (j < k)
    index, p = (jnp.sum(jnp.where(here, x, 0.0), axis=1, keepdims=True) for x in (index, p))
    return index.astype(I32), p


def places(scores, index):
    """How many of [1, n] come before each: [1, n] int32. Not numbers come before nobody and after nobody."""
    tiles = list(zip(_tiles(scores), _tiles(index), strict=True))
    columns = [[jnp.broadcast_to(x, (LANES, LANES)).T for x in tile] for tile in tiles]

    def before(column, row):
        return ((column[0] > row[0]) | ((column[0] == row[0]) & (column[1] < row[1]))).astype(I32)

    counts = (sum(before(column, row) for column in columns) for row in tiles)
    return joined([jnp.sum(x, axis=0, keepdims=True) for x in counts], 1)


def _of_best_lanes(k: int, *rows):
    """Scores, indices and what else there is, [1, E] each, of the lanes in which the k best are: [1, k E / 128] in
    whole tiles. Before an expert that is not in the k lanes with the best experts come the best of these lanes."""
    scores, index = (_tiles(x) for x in rows[:2])
    top, first = scores[0], index[0]
    for s, i in zip(scores[1:], index[1:], strict=True):
        first, top = jnp.where(s > top, i, first), jnp.where(s > top, s, top)
    lane = lax.broadcasted_iota(I32, (round_up(k, 8), LANES), 0)
    chosen = (places(top, first) == lane).astype(F32)

    def of_lanes(x):
        """A product with one 1 in every sum: exact."""
        of_tiles = lax.dot_general(joined(_tiles(x), 0), chosen, (((1,), (1,)), ((), ())), precision=HIGHEST)
        return joined([of_tiles[t : t + 1, :k] for t in range(len(of_tiles))], 1)

    width = k * len(scores)
    pad = ((0, 0), (0, round_up(width, LANES) - width))
    scores, *others = (of_lanes(x) for x in rows)
    return (jnp.pad(scores, pad, constant_values=-jnp.inf), *(jnp.pad(x, pad) for x in others))


def _tiles(x) -> list:
    return [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
