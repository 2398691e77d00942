"""The router's choice: k experts per row, the lowest index first among equals, and their weights; both into SMEM.

Every expert is compared with every other: how many come before it is its place. That is more arithmetic than taking the
best k times, and no chain of k reductions over lanes, each of which waits for the one before.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.config import LANES, round_up
from pallas_kernels.decode.core import F32, I32, Core, joined, pad_lanes


def choose(core: Core, logits, bias) -> None:
    """Top k of sigmoid(logits) + bias (logits [B, E], bias [1, E]) into `core.scalars`, [place, row].

    The bias decides who is chosen and never enters the weights (report Eq. 13).
    """
    c, b, s = core.config.moe, core.buffers, core.scalars
    E = round_up(c.experts, LANES)
    p = pad_lanes(jax.nn.sigmoid(logits), E)
    real = lax.broadcasted_iota(I32, p.shape, 1) < c.experts
    scores = jnp.where(real, p + pad_lanes(bias, E), -jnp.inf)
    chosen, weights = jnp.zeros(b.chosen.shape, I32), jnp.zeros(b.weights.shape, F32)
    for row in range(len(logits)):
        index, weight = best(c.top_k, scores[row : row + 1], p[row : row + 1], len(chosen))
        if c.renormalize:
            weight = weight / (jnp.sum(weight, axis=0, keepdims=True) + 1e-20)
        here = lax.broadcasted_iota(I32, chosen.shape, 1) == row
        chosen, weights = jnp.where(here, index, chosen), jnp.where(here, weight * c.scale, weights)
    b.chosen[...], b.weights[...] = jnp.minimum(chosen, c.experts - 1), weights
    ends = enumerate(((b.chosen, s.chosen), (b.weights, s.weights)))
    copies = [pltpu.make_async_copy(*end, core.semaphores.scalars.at[number]) for number, end in ends]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()


def best(k: int, scores, p, rows: int):
    """Of one row [1, E]: indices and p of the k best in the order of their places, [rows, 1] each."""
    place = places(scores)
    j = lax.broadcasted_iota(I32, (rows, scores.shape[1]), 0)
    here = (place == j) & (j < k)
    expert = lax.broadcasted_iota(I32, here.shape, 1)
    return (jnp.sum(jnp.where(here, x, jnp.zeros((), x.dtype)), axis=1, keepdims=True) for x in (expert, p))


def places(scores):
    """How many come before each of [1, E]: [1, E] int32. Not numbers come before nobody and after nobody."""
    tiles = [scores[:, i : i + LANES] for i in range(0, scores.shape[1], LANES)]
    columns = [jnp.broadcast_to(x, (LANES, LANES)).T for x in tiles]
    earlier = lax.broadcasted_iota(I32, (LANES, LANES), 0) < lax.broadcasted_iota(I32, (LANES, LANES), 1)

    def before(i, j):
        """Which of tile i come before which of tile j."""
        if i == j:
            return (columns[i] > tiles[j]) | ((columns[i] == tiles[j]) & earlier)
        return columns[i] >= tiles[j] if i < j else columns[i] > tiles[j]

    counts = (sum(before(i, j).astype(I32) for i in range(len(tiles))) for j in range(len(tiles)))
    return joined([jnp.sum(x, axis=0, keepdims=True) for x in counts], 1)
