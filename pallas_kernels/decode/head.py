"""The two ends of a step: the embedding of its token, and logits and greedy choice of the next one."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.config import LANES
from pallas_kernels.decode.core import F32, I32, Core
from pallas_kernels.decode.ring import Ring


def embed(core: Core, links: Links) -> None:
    """Each rank has its columns of every token's embedding: [B, D] into `residual`."""
    c, b = core.config, core.buffers
    copies = [
        pltpu.make_async_copy(core.weights.embed.at[core.token[row]], b.embed.at[row], core.semaphores.embed.at[row])
        for row in range(c.rows)
    ]
    for copy in copies:
        copy.start()
    for copy in copies:
        copy.wait()
    rows = [jnp.concatenate([b.embed[row, :1], b.embed[row, 1:]], axis=1) for row in range(c.rows)]
    part = jnp.concatenate(rows, axis=0).astype(F32)
    links.start("hidden", part[:, : core.plan.exchanges["hidden"].shape[1]])
    links.finish("hidden")
    b.residual[...] = links.whole("hidden", c.hidden)


def choose(core: Core, ring: Ring, links: Links, x, logits_out, token_out) -> None:
    """This rank's logits [B, vocab / ranks] of x [B, D], and the token of the largest of all (the first of equals)."""
    c = core.config
    width = c.share(c.vocab)
    logits = ring.product(core.plan.tape.head, core.plan.tape.head_start, "head", x)
    logits_out[...] = logits
    best = jnp.max(logits, axis=1, keepdims=True)
    column = lax.broadcasted_iota(I32, logits.shape, 1)
    index = jnp.min(jnp.where(logits == best, column, width), axis=1, keepdims=True) + core.rank * width
    lane = lax.broadcasted_iota(I32, (c.rows, LANES), 1)
    # float32 holds every index below 2 ** 24 exactly
    links.start("token", jnp.where(lane == 0, best, index.astype(F32)))
    buffer = links.finish("token")
    best, index = buffer[0, :, :1], buffer[0, :, 1:2]
    for n in range(1, c.ranks):
        better = buffer[n, :, :1] > best
        best, index = jnp.where(better, buffer[n, :, :1], best), jnp.where(better, buffer[n, :, 1:2], index)
    token_out[...] = jnp.broadcast_to(index, (c.rows, LANES)).astype(I32)
