"""Kimi Delta Attention over rows that are cut into fragments over the ranks of a mesh axis (report §5.1.2, Eq. 17).

A fragment's tokens act on the state as the affine map S -> M S + S0: M is the product of the tokens' transitions, S0
the state that they leave when they start from zero. Maps compose (`kda_combine`), so an exclusive prefix over the
fragments gives each its entry state, with which it runs as if it were alone. All inside jax.shard_map, where a rank's
fragments are rows (`Layout`); M and S0 are float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3_jax import sharding
from k3_jax.parallel.fragments import Layout
from pallas_kernels.common.dispatch import vary_alike
from pallas_kernels.kda import kda_combine

Map = tuple[Float[Array, "BF H K K"], Float[Array, "BF H K V"]]
# run(q, k, v, g, beta, initial_state, segment_ids) -> (o, final_state): one of pallas_kernels.kda, its gate bound.
Attend = Callable[..., tuple[Array, Array]]
# (own, layout) -> states before each fragment and after all.
Prefix = Callable[[Map, Layout], tuple[Array, Array]]


def context_kda(
    attend: Attend,
    q: Float[Array, "BF t H K"],
    k: Float[Array, "BF t H K"],
    v: Float[Array, "BF t HV V"],
    g: Float[Array, "BF t HV K"],
    beta: Float[Array, "BF t HV"],
    initial_state: Float[Array, "B HV K V"],
    segment_ids: Int[Array, "BF t"],
    layout: Layout,
) -> tuple[Float[Array, "BF t HV V"], Float[Array, "B HV K V"]]:
    """The outputs of this rank's fragments, and the state after each whole row, the same on all ranks.

    Documents (runs of equal ids) may cross any number of fragments; one may hold padding only (ids < 0).
    `initial_state` seeds the row's first document. `g` is what `attend` takes.
    """
    per_state = lambda rows: rows[:, None, None, None]  # noqa: E731
    joined, first = continues(segment_ids, layout), layout.numbers(len(q)) == 0
    M, S = own_map(attend, q, k, v, g, beta, segment_ids)
    M, start = jnp.where(per_state(joined), M, 0.0), layout.each(initial_state)
    S = jnp.where(per_state(first), kda_combine((M, S), (M, start))[1], S)
    before, after = cheapest_prefix(layout, *S.shape[1:])((M, S), layout)
    entry = jnp.where(per_state(first), start, jnp.where(per_state(joined), before, 0.0))
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


def continues(segment_ids: Int[Array, "BF t"], layout: Layout) -> Bool[Array, " BF"]:
    """Whether a fragment's first live token belongs to the document of the last live one before it. A fragment of
    padding passes the state on; where nothing came before, the first document is continued."""
    live, (rows, T) = segment_ids >= 0, segment_ids.shape
    any_live = live.any(1)
    first = jnp.take_along_axis(segment_ids, jnp.argmax(live, 1)[:, None], 1)[:, 0]
    last = jnp.take_along_axis(segment_ids, T - 1 - jnp.argmax(live[:, ::-1], 1)[:, None], 1)[:, 0]
    lasts, lives = (layout.each(layout.gather(x)) for x in (last, any_live))
    earlier = lives & (jnp.arange(layout.total)[None] < layout.numbers(rows)[:, None])
    before = jnp.take_along_axis(lasts, _last(earlier)[:, None], 1)[:, 0]
    return ~any_live | ~earlier.any(1) | (first == before)


def halo(tokens: tuple[Array, ...], first: tuple[Array, ...], layout: Layout) -> tuple[Array, ...]:
    """The positions before each fragment: the last ones [BF, w, ...] of the one before it, as many as `first` has,
    which a row's first fragment takes. Raises ValueError if a fragment holds fewer."""
    width, T = first[0].shape[1], tokens[0].shape[1]
    if T < width:
        raise ValueError(
            f"{T} tokens per fragment of the {layout.axis!r} axis: expected at least {width}, what a convolution needs"
        )
    at_start = layout.numbers(len(tokens[0])) == 0

    def before(x, start):
        left = layout.shift(x[:, T - width :], 1)
        return jnp.where(at_start.reshape(-1, *(1,) * (x.ndim - 1)), start.astype(x.dtype), left)

    return tuple(before(x, start) for x, start in zip(tokens, first, strict=True))


def of_last_live(x: Array, segment_ids: Int[Array, "BF t"], layout: Layout) -> Array:
    """x [BF, ...] of the last fragment with a live token in each row, or else of the first: [B, ...], the same on all
    ranks."""
    lives = layout.gather((segment_ids >= 0).any(1))
    last = jnp.where(lives.any(1), _last(lives), 0)
    return layout.pick(x, layout.numbers(len(x)) == layout.each(last))


def _last(marks: Bool[Array, "B N"]) -> Int[Array, " B"]:
    """The last fragment that is marked; of no use where none is."""
    return marks.shape[1] - 1 - jnp.argmax(marks[:, ::-1], axis=1)


def prefix_bytes(layout: Layout, heads: int, K: int, V: int) -> dict[Prefix, int]:
    """What a rank receives, for one row and layer: everybody's maps, or runs of maps and then a state."""
    distances = [2**i for i in range((layout.total - 1).bit_length())]
    state, both = 4 * heads * K * V, 4 * heads * K * (K + V)
    doubling = both * sum(map(layout.arrivals, distances)) + state * layout.arrivals(1)
    return {by_gather: both * layout.fragments * (layout.ranks - 1), by_doubling: doubling}


def cheapest_prefix(layout: Layout, heads: int, K: int, V: int) -> Prefix:
    if sharding.pipe_size() > 1:  # a shift would be a gather (`Layout.shift`)
        return by_gather
    received = prefix_bytes(layout, heads, K, V)
    return min(received, key=received.__getitem__)


def by_doubling(own: Map, layout: Layout) -> tuple[Array, Array]:
    """States before each fragment and after all, by log2 N rounds in which runs of maps grow twice as long."""
    number, run, distance = layout.numbers(len(own[0])), own, 1
    while distance < layout.total:
        longer = kda_combine(run, tuple(layout.shift(x, distance) for x in run))
        enough = (number >= distance)[:, None, None, None]
        run = tuple(jnp.where(enough, new, old) for new, old in zip(longer, run, strict=True))
        distance *= 2
    return layout.shift(run[1], 1), layout.pick(run[1], number == layout.total - 1)


def by_gather(own: Map, layout: Layout) -> tuple[Array, Array]:
    """The same from everybody's map, folded on each rank."""
    number, maps = layout.numbers(len(own[0])), tuple(layout.gather(x) for x in own)
    _, after = jax.lax.associative_scan(lambda earlier, later: kda_combine(later, earlier), maps, axis=1)
    row = jnp.arange(len(number)) // layout.fragments
    before = jnp.where((number > 0)[:, None, None, None], after[row, jnp.maximum(number - 1, 0)], 0.0)
    return before, layout.pick(layout.each(after[:, -1]), number == layout.total - 1)
