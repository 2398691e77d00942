"""The router's choice: k experts per row, the lowest index first among equals, and their weights; both into SMEM."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.config import LANES
from pallas_kernels.decode.core import F32, I32, Core, pad_rows


def choose(core: Core, logits, bias) -> None:
    """Top k of sigmoid(logits) + bias (logits [B, E], bias [1, E]) into `core.scalars`.

    The bias decides who is chosen and never enters the weights (report Eq. 13).
    """
    c = core.config.moe
    scores = jax.nn.sigmoid(logits)
    left = scores + bias
    expert, lane = (lax.broadcasted_iota(I32, (len(logits), size), 1) for size in (c.experts, LANES))
    picked, p = jnp.zeros(lane.shape, I32), jnp.zeros(lane.shape, F32)
    for j in range(c.top_k):
        best = jnp.max(left, axis=1, keepdims=True)
        index = jnp.min(jnp.where(left == best, expert, c.experts), axis=1, keepdims=True)
        index = jnp.minimum(index, c.experts - 1)  # scores that are NaN choose nobody: no record is beyond the last
        here = expert == index
        score = jnp.sum(jnp.where(here, scores, 0.0), axis=1, keepdims=True)
        picked, p = jnp.where(lane == j, index, picked), jnp.where(lane == j, score, p)
        left = jnp.where(here, -jnp.inf, left)
    if c.renormalize:
        p = p / (jnp.sum(p, axis=1, keepdims=True) + 1e-20)
    b, s = core.buffers, core.scalars
    b.chosen[...], b.weights[...] = pad_rows(picked, 8), pad_rows(p * c.scale, 8)
    ends = enumerate(((b.chosen, s.chosen), (b.weights, s.weights)))
    copies = [pltpu.make_async_copy(*end, core.semaphores.scalars.at[number]) for number, end in ends]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
