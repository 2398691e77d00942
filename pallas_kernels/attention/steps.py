"""The steps of a blockwise causal kernel: which blocks of queries and keys meet, in a flat list without the empty ones.

The list is made on the device from the segments, so that packed documents cost what they contain: the grid is as long
as the longest row's list.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

# What a step does. A table that holds FULL in every word describes the steady step.
EMPTY, MASKED, FULL = 0, 1, 2


class Steps(NamedTuple):
    """Scalars of each step, int32.

    q, k        blocks of queries and of keys.
    kind        EMPTY, MASKED or FULL.
    continued   0 where the block that stays while the other moves is new; `continues`: 0 where it is at its end.
    out         the block of queries whose results are written in this step or a later one, counted from the first.
    """

    q: Int32[Array, "B M"]
    k: Int32[Array, "B M"]
    kind: Int32[Array, "B M"]
    continued: Int32[Array, "B M"]
    continues: Int32[Array, "B M"]
    out: Int32[Array, "B M"]


class Pairs(NamedTuple):
    """Blocks of each row of a batch: do pairs (q, k) meet, and do all their tokens."""

    live: Bool[Array, "B N N"]
    full: Bool[Array, "B N N"]


def pairs_of(segment_ids: Int[Array, "B T"] | None, batch: int, blocks: int) -> Pairs:
    """Blocks meet where the ranges of their segments overlap, and always on the diagonal, where results are written."""
    q, k = np.indices((blocks, blocks))
    diagonal, causal = (
        np.broadcast_to(q == k, (batch, blocks, blocks)),
        np.broadcast_to(q >= k, (batch, blocks, blocks)),
    )
    if segment_ids is None:
        return Pairs(jnp.asarray(causal), jnp.asarray(causal & ~diagonal))
    ids = segment_ids.reshape(batch, blocks, -1)
    low = jnp.min(jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids), axis=2)
    high = jnp.max(ids, axis=2)
    overlap = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
    one = (low == high) & jnp.all(ids >= 0, axis=2)
    same = one[:, :, None] & one[:, None] & (low[:, :, None] == low[:, None])
    return Pairs(causal & overlap | diagonal, causal & same & ~diagonal)


def by_queries(pairs: Pairs) -> tuple[Steps, Int[Array, ""]]:
    """Each block of queries with the keys before it: the forward pass. And the number of steps."""
    q, k = np.tril_indices(pairs.live.shape[1])
    return _steps(pairs, q, k, q, jnp.asarray(q))


def by_keys(pairs: Pairs, first, span: int) -> tuple[Steps, Int[Array, ""]]:
    """Each block of keys with those of the `span` blocks of queries from `first` on that see it: the backward pass."""
    k, q = np.triu_indices(pairs.live.shape[1])
    inside = np.arange(pairs.live.shape[1])
    inside = (inside >= first) & (inside < first + span)
    return _steps(pairs._replace(live=pairs.live & inside[None, :, None]), q, k, k, jnp.maximum(k - first, 0))


def _steps(pairs: Pairs, q, k, group, out) -> tuple[Steps, Int[Array, ""]]:
    """Live pairs in the order given; then, up to the longest row's, the last one again with nothing to do."""
    live = pairs.live[:, q, k]
    count = jnp.sum(live, axis=1, keepdims=True, dtype=jnp.int32)
    number = jnp.arange(len(q), dtype=jnp.int32)[None]
    order = jnp.argsort(~live, axis=1, stable=True)
    order = jnp.take_along_axis(order, jnp.minimum(number, count - 1), axis=1)
    kind = jnp.where(pairs.full[:, q, k], FULL, MASKED)
    kind = jnp.where(number < count, jnp.take_along_axis(kind, order, axis=1), EMPTY)
    q, k, group, out = (jnp.asarray(x, jnp.int32)[order] for x in (q, k, group, out))
    change = jnp.pad(group[:, 1:] != group[:, :-1], ((0, 0), (1, 1)), constant_values=True)
    new = change[:, :-1]
    last = change[:, 1:] | (number == count - 1)
    flags = (jnp.where(x & (number < count), 0, FULL) for x in (new, last))
    return Steps(q, k, kind, *flags, out), jnp.max(count)
