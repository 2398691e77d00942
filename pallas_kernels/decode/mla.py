"""The Gated MLA mixer of a layer, absorbed: attention of all heads to the cached latents themselves.

Query and latent come from matrices whose outputs every rank needs (`mla_down`). Then each rank either attends with its
own heads to the whole cache, or, with a cache that is cut over the ranks, with all heads to its tiles of it: queries
travel, and sums with their peaks travel back and are merged by log-sum-exp.

Rows are taken in their order, each after the latent of the row before has reached its slot in HBM: a row of the same
sequence finds it there, also in the tile that it adds its own to.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.config import LANES
from pallas_kernels.decode.core import F32, I32, LOWEST, Core, pad_lanes
from pallas_kernels.decode.plan import VECTORS
from pallas_kernels.decode.reference import rms
from pallas_kernels.decode.ring import Ring

SUBLANES = 16  # rows of a bfloat16 tile: the least that can be written back


def mixer(core: Core, ring: Ring, links: Links, x, vectors, number, start) -> None:
    """Start the sum of the output for x [B, D] of MLA layer `number`; its tiles begin at `start`."""
    part, c = core.plan.tape.mla, core.config
    h = c.share(c.mla.heads)
    down = ring.product(part, start, "down", x)
    links.start_padded("mla_down", down)
    gate = ring.product(part, start, "gate", x)
    query, latent = _finish_down(core, links, vectors)
    q = ring.product(part, start, "query", query).astype(c.dtype)
    queries = [_query(core, ring, start, q, head) for head in range(h)]
    queries = jnp.concatenate([query[b : b + 1] for b in range(c.rows) for query in queries], axis=0)
    if c.cache_ranks > 1:
        context = _over_ranks(core, links, queries, latent, number)
    else:
        context = _attend(core, queries, latent, number)
    C = c.mla.kv_rank
    weight = context[:, C + 1 : C + 2]
    context = context[:, :C] / jnp.where(weight == 0.0, 1.0, weight)  # an idle row attends to nothing
    o = [ring.product(part, start, f"value_{head}", _rows(context, head, h, c.rows)) for head in range(h)]
    o = jnp.concatenate(o, axis=1) * jax.nn.sigmoid(gate)
    links.start_sum("mixer_sum", ring.product(part, start, "output", o))
    _await_append(core, c.rows - 1)


def _rows(x, head: int, heads: int, rows: int):
    """Of [rows * heads, n] those of one head."""
    return jnp.concatenate([x[b * heads + head : b * heads + head + 1] for b in range(rows)], axis=0)


def _finish_down(core: Core, links: Links, vectors):
    """(normed query [B, Q], latent row of the cache [B, key_width]), both rounded."""
    c = core.config
    s, own = c.mla, c.share(c.mla.q_rank)
    links.finish("mla_down")
    query = links.gathered("mla_down", own)
    latent = links.gathered("mla_down", c.share(s.kv_rank + s.pe), own)
    weight = lambda name, width: vectors[VECTORS.index(name) : VECTORS.index(name) + 1, :width]  # noqa: E731
    query = rms(query, s.norm_eps, c.own.q_rank) * weight("q_norm", s.q_rank)
    normed = rms(latent[:, : s.kv_rank], s.norm_eps, c.own.kv_rank) * weight("kv_norm", s.kv_rank)
    row = jnp.concatenate([normed, latent[:, s.kv_rank :]], axis=1)
    return query.astype(c.dtype), pad_lanes(row, c.key_width).astype(c.dtype)


def _query(core: Core, ring: Ring, start, q, head: int):
    """One head's query over latents and the extra key: [B, key_width]."""
    c = core.config
    s, h = c.mla, c.share(c.mla.heads)
    nope = q[:, head * s.nope : (head + 1) * s.nope]
    pe = q[:, h * s.nope + head * s.pe : h * s.nope + (head + 1) * s.pe]
    absorbed = ring.product(core.plan.tape.mla, start, f"absorb_{head}", nope).astype(c.dtype)
    return pad_lanes(jnp.concatenate([absorbed, pe], axis=1), c.key_width)


def _over_ranks(core: Core, links: Links, queries, latent, number):
    """Attention with every rank's part of the cache: sums as `_attend` has them, for this rank's heads."""
    c = core.config
    h, N = c.share(c.mla.heads), c.ranks
    links.start("queries", queries)
    buffer = links.finish("queries")
    all_heads = [buffer[n, b * h : (b + 1) * h, :] for b in range(c.rows) for n in range(N)]
    sums = _attend(core, jnp.concatenate(all_heads, axis=0), latent, number)
    of_rank = lambda n: [sums[(b * N + n) * h : (b * N + n + 1) * h] for b in range(c.rows)]  # noqa: E731
    links.start_each("contexts", [jnp.concatenate(of_rank(n), axis=0) for n in range(N)])
    buffer = links.finish("contexts")
    parts = [buffer[n] for n in range(N)]
    C = c.mla.kv_rank
    peak = parts[0][:, C : C + 1]
    for part in parts[1:]:
        peak = jnp.maximum(peak, part[:, C : C + 1])
    scaled = [part * jnp.exp(part[:, C : C + 1] - peak) for part in parts]
    return sum(scaled[1:], scaled[0])


def _attend(core: Core, queries, latent, number):
    """Attention of all rows' heads [B HQ, key_width] to this rank's tiles of the cache.

    Returns [B HQ, C + 128]: the sum of exp(score - peak) times latents, the peak, the sum of exp(score - peak). The new
    `latent` [B, key_width] joins the cache of its rank.
    """
    c = core.config
    heads = c.query_heads
    for row in range(c.rows):
        q = queries[row * heads : (row + 1) * heads]
        place = slice(row * heads, (row + 1) * heads)
        if row:
            _await_append(core, row - 1)
        core.buffers.attended[place] = _attend_row(core, q, latent[row : row + 1], number, row)
    return core.buffers.attended[...]


def _first_tile(core: Core):
    """Tiles of a cache are dealt in turn: this rank's are this one and every cache_ranks-th after it."""
    return core.rank if core.config.cache_ranks > 1 else 0


def _attend_row(core: Core, q, latent, number, row: int):
    c, b, first = core.config, core.buffers, _first_tile(core)
    size, C, heads = c.blocks.cache_rows, c.mla.kv_rank, len(q)
    position = core.position[row]
    newest = lax.div(position, size)  # the tile of the new token
    count = jnp.where(position < 0, 0, lax.div(newest + c.cache_ranks - first, c.cache_ranks))

    def copy(j):
        source = core.caches.latent.at[number, core.slots.latent[row], pl.ds(pl.multiple_of(j * size, size), size)]
        return pltpu.make_async_copy(source, b.latent.at[lax.rem(j, 2)], core.semaphores.latent.at[lax.rem(j, 2)])

    @pl.when(count > 0)
    def _():
        copy(0).start()

    def one(j, carry):
        peak, weight, context = carry
        copy(j).wait()

        @pl.when(j + 1 < count)
        def _():
            copy(j + 1).start()

        tile = j * c.cache_ranks + first

        @pl.when(tile == newest)
        def _():
            _append(core, latent, number, row, j, lax.rem(position, size))

        keys = b.latent[lax.rem(j, 2)]
        s = lax.dot_general(q, keys, (((1,), (1,)), ((), ())), precision=c.precision, preferred_element_type=F32)
        s = s * c.own.query**-0.5
        s = jnp.where(tile * size + lax.broadcasted_iota(I32, s.shape, 1) <= position, s, LOWEST)
        top = jnp.maximum(peak, jnp.max(s, axis=1, keepdims=True))
        p, shrink = jnp.exp(s - top), jnp.exp(peak - top)
        weight = shrink * weight + jnp.sum(p, axis=1, keepdims=True)
        values = jnp.dot(p.astype(c.dtype), keys[:, :C], precision=c.precision, preferred_element_type=F32)
        return top, weight, shrink * context + values

    zero = jnp.zeros((heads, 1), F32)
    peak, weight, context = lax.fori_loop(0, count, one, (zero + LOWEST, zero, jnp.zeros((heads, C), F32)))
    lane = lax.broadcasted_iota(I32, (heads, LANES), 1)
    tail = jnp.where(lane == 0, peak, jnp.where(lane == 1, weight, 0.0))
    return jnp.concatenate([context, tail], axis=1)


def _append(core: Core, latent, number, row: int, tile, offset) -> None:
    """Put the new token into a tile in VMEM, and start what changed of it on its way to HBM."""
    b, size = core.buffers, core.config.blocks.cache_rows
    place = lax.rem(tile, 2)
    keys = b.latent[place]
    here = lax.broadcasted_iota(I32, keys.shape, 0) == offset
    b.latent[place] = jnp.where(here, jnp.broadcast_to(latent, keys.shape), keys)
    group = pl.multiple_of(lax.div(offset, SUBLANES) * SUBLANES, SUBLANES)
    start = pl.multiple_of(tile * size + group, SUBLANES)
    _back(core, number, row, place, group, start).start()


def _back(core: Core, number, row: int, place, group, start):
    """Some rows of a tile in VMEM to the cache."""
    target = core.caches.latent.at[number, core.slots.latent[row], pl.ds(start, SUBLANES)]
    source = core.buffers.latent.at[place, pl.ds(group, SUBLANES)]
    return pltpu.make_async_copy(source, target, core.semaphores.latent_back.at[0])


def _await_append(core: Core, row: int) -> None:
    """The row's new token is in HBM, if it belongs to this rank; its tile in VMEM is then free."""
    position = core.position[row]
    tile = lax.div(position, core.config.blocks.cache_rows)
    here = lax.rem(tile, core.config.cache_ranks) == _first_tile(core)
    pl.when((position >= 0) & here)(lambda: _back(core, 0, row, 0, 0, 0).wait())
