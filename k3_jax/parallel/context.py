"""Kimi Delta Attention over a sequence that is cut over the ranks of a mesh axis (report §5.1.2, Eq. 17).

A rank's tokens act on the state as the affine map S -> M S + S0: M is the product of the tokens' transitions, S0 the
state that they leave when they start from zero. Maps compose (`kda_combine`), so an exclusive prefix over the ranks
gives each its entry state, with which it runs as if it were alone. All inside jax.shard_map; M and S0 are float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.dispatch import vary_alike
from pallas_kernels.kda import kda_combine

Map = tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]
# run(q, k, v, g, beta, initial_state, segment_ids) -> (o, final_state): one of pallas_kernels.kda, its gate bound.
Attend = Callable[..., tuple[Array, Array]]
# Reading everybody's map moves R - 1 of them, doubling rounds log2 R + 1: up to so many ranks the former is no more.
FEW_RANKS = 4


def context_kda(
    attend: Attend,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "B HV K V"],
    segment_ids: Int[Array, "B T"],
    axis: str,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """This rank's outputs, and the state after the whole sequence, the same on all ranks of `axis`.

    Ranks hold the sequence in order. Documents (runs of equal ids) may cross any number of them; a rank may hold
    padding only (ids < 0). `initial_state` seeds the sequence's first document. `g` is what `attend` takes.
    """
    joined = continues(segment_ids, axis)
    M, S = own_map(attend, q, k, v, g, beta, segment_ids)
    M = jnp.where(joined[:, None, None, None], M, 0.0)
    first = jax.lax.axis_index(axis) == 0
    S = jnp.where(first, kda_combine((M, S), (M, initial_state))[1], S)
    rounds = by_gather if jax.lax.axis_size(axis) <= FEW_RANKS else by_doubling
    before, after = rounds((M, S), axis)
    entry = jnp.where(first, initial_state, jnp.where(joined[:, None, None, None], before, 0.0))
    o, _ = attend(q, k, v, g, beta, entry, segment_ids)
    return o, after


def own_map(attend: Attend, q, k, v, g, beta, segment_ids) -> Map:
    """M and S0 at once: the state of values [v | 0] that starts as [0 | I] ends as [S0 | M]."""
    (B, T, HV, V), K = v.shape, k.shape[-1]
    values = jnp.concatenate([v, jnp.zeros((B, T, HV, K), v.dtype)], axis=-1)
    start = jnp.concatenate([jnp.zeros((K, V)), jnp.eye(K)], axis=-1)
    start = jnp.broadcast_to(start[None, None], (B, HV, K, V + K)).astype(jnp.float32)
    _, end = attend(q, k, *vary_alike(values, g, beta, start, segment_ids, like=(v,)))
    return end[..., V:], end[..., :V]


def continues(segment_ids: Int[Array, "B T"], axis: str) -> Bool[Array, " B"]:
    """Whether this rank's first live token belongs to the document of the last live one before it. A rank of padding
    passes the state on; where nothing came before, the first document is continued."""
    live, R = segment_ids >= 0, jax.lax.axis_size(axis)
    T = segment_ids.shape[1]
    any_live = live.any(1)
    first = jnp.take_along_axis(segment_ids, jnp.argmax(live, 1)[:, None], 1)[:, 0]
    last = jnp.take_along_axis(segment_ids, T - 1 - jnp.argmax(live[:, ::-1], 1)[:, None], 1)[:, 0]
    lasts, lives = jax.lax.all_gather((last, any_live), axis)
    earlier = lives & (jnp.arange(R) < jax.lax.axis_index(axis))[:, None]
    before = jnp.take_along_axis(lasts, _last(earlier)[None], axis=0)[0]
    return ~any_live | ~earlier.any(0) | (first == before)


def halo(tokens: tuple[Array, ...], first: tuple[Array, ...], axis: str) -> tuple[Array, ...]:
    """The positions before this rank's: the last ones [B, w, ...] of its left neighbour's `tokens`, as many as `first`
    has, which the first rank takes. Raises ValueError if a rank holds fewer."""
    width, T = first[0].shape[1], tokens[0].shape[1]
    if T < width:
        raise ValueError(
            f"{T} tokens per rank of the {axis!r} axis: expected at least {width}, what a convolution needs"
        )
    left = preceding(tuple(x[:, T - width :] for x in tokens), axis)
    at_start = jax.lax.axis_index(axis) == 0
    return tuple(jnp.where(at_start, x.astype(y.dtype), y) for x, y in zip(first, left, strict=True))


def preceding(x, axis: str):
    """The left neighbour's x, an array or a tree of them; zeros on the first rank."""
    return jax.lax.ppermute(x, axis, [(r, r + 1) for r in range(jax.lax.axis_size(axis) - 1)])


def following(x: Array, axis: str) -> Array:
    """The right neighbour's x; zeros on the last rank."""
    return jax.lax.ppermute(x, axis, [(r, r - 1) for r in range(1, jax.lax.axis_size(axis))])


def of_last_rank(x: Array, segment_ids: Int[Array, "B T"], axis: str) -> Array:
    """x [B, ...] of the last rank with a live token in each row, or else of the first; the same on all ranks."""
    lives = jax.lax.all_gather((segment_ids >= 0).any(1), axis)
    last = jnp.where(lives.any(0), _last(lives), 0)
    mine = (last == jax.lax.axis_index(axis)).reshape(-1, *(1,) * (x.ndim - 1))
    return jax.lax.psum(jnp.where(mine, x, jnp.zeros_like(x)), axis)


def _last(marks: Bool[Array, "R B"]) -> Int[Array, " B"]:
    """The last rank that is marked; of no use where none is."""
    return marks.shape[0] - 1 - jnp.argmax(marks[::-1], axis=0)


def by_doubling(own: Map, axis: str) -> tuple[Array, Array]:
    """States before this rank and after all, by log2 R rounds in which ranks pass on twice as long a run of maps."""
    R, me, run, distance = jax.lax.axis_size(axis), jax.lax.axis_index(axis), own, 1
    while distance < R:
        left = jax.lax.ppermute(run, axis, [(r, r + distance) for r in range(R - distance)])
        longer = kda_combine(run, left)
        run = jax.tree.map(lambda new, old: jnp.where(me >= distance, new, old), longer, run)  # noqa: B023
        distance *= 2
    return preceding(run[1], axis), jax.lax.psum(jnp.where(me == R - 1, run[1], 0.0), axis)


def by_gather(own: Map, axis: str) -> tuple[Array, Array]:
    """The same from everybody's map, folded on each rank."""
    maps, me = jax.lax.all_gather(own, axis), jax.lax.axis_index(axis)
    _, after = jax.lax.associative_scan(lambda earlier, later: kda_combine(later, earlier), maps)
    before = jnp.where(me > 0, after[jnp.maximum(me - 1, 0)], 0.0)
    last = jnp.where(me == jax.lax.axis_size(axis) - 1, after[-1], 0.0)
    return before, jax.lax.psum(last, axis)
