"""The steps of a blockwise causal kernel: which blocks of queries and keys meet, in a flat list without the empty ones.

The list is made on the device from the segments, so that packed documents cost what they contain: the grid is as long
as the longest row's list.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.common.dispatch import vary_alike

# What a step does.
EMPTY, MASKED, FULL = 0, 1, 2
BITS = {"q": 12, "k": 12, "kind": 2, "continued": 1, "continues": 1}


class Steps(NamedTuple):
    """Each step's fields, int32, which travel as one word: the scalar memory of a core holds some 200,000.

    q, k        blocks of queries and of keys, both counted from 0.
    kind        EMPTY, MASKED or FULL.
    continued   0 where the block that stays while the other moves is new; `continues`: 0 where it is at its end.
    """

    q: Int32[Array, "B M"]
    k: Int32[Array, "B M"]
    kind: Int32[Array, "B M"]
    continued: Int32[Array, "B M"]
    continues: Int32[Array, "B M"]

    def words(self):
        """[B, M]."""
        word, low = 0, 0
        for name, bits in BITS.items():
            word, low = word | getattr(self, name) << low, low + bits
        return word


def field(word, name: str):
    """Of a step's word."""
    names = list(BITS)
    low = sum(BITS[before] for before in names[: names.index(name)])
    return (word >> low) & ((1 << BITS[name]) - 1)


# The word of a step without a mask in the middle of a list.
STEADY = Steps(q=3, k=1, kind=FULL, continued=1, continues=1).words()


class Pairs(NamedTuple):
    """Blocks of each row of a batch: is there a step for the pair (q, k), and of which kind."""

    live: Bool[Array, "B Q K"]
    kind: Int32[Array, "B Q K"]


def pairs_of(segment_ids: Int[Array, "B S"] | None, batch: int, queries: int, keys: int, offset) -> Pairs:
    """Blocks of keys, and blocks of queries that are those from number `offset` on. They meet where the ranges of their
    segments overlap, and always on the diagonal, where results are written."""
    q, k = np.indices((queries, keys))
    shape = batch, queries, keys
    diagonal, causal = (jnp.broadcast_to(x, shape) for x in (q + offset == k, q + offset >= k))
    if segment_ids is None:
        return Pairs(causal, jnp.where(diagonal, MASKED, FULL))
    ids = segment_ids.reshape(batch, keys, -1)
    low, high = jnp.min(jnp.where(ids < 0, jnp.iinfo(jnp.int32).max, ids), axis=2), jnp.max(ids, axis=2)
    of_keys = low, high, (low == high) & jnp.all(ids >= 0, axis=2)
    of_queries = (jax.lax.dynamic_slice_in_dim(x, offset, queries, axis=1)[:, :, None] for x in of_keys)
    (low, high, one), (q_low, q_high, q_one) = (x[:, None] for x in of_keys), of_queries
    overlap = (q_low <= high) & (low <= q_high)
    same = q_one & one & (q_low == low)
    return Pairs(causal & overlap | diagonal, jnp.where(same & ~diagonal, FULL, MASKED))


def with_unseen(pairs: Pairs) -> Pairs:
    """And a step that does nothing for keys that no query sees, so that their gradients are written too."""
    unseen = ~jnp.any(pairs.live, axis=1, keepdims=True)
    last = np.arange(pairs.live.shape[1])[None, :, None] == pairs.live.shape[1] - 1
    return Pairs(pairs.live | unseen & last, jnp.where(unseen, EMPTY, pairs.kind))


def by_queries(pairs: Pairs) -> tuple[Steps, Int[Array, ""]]:
    """Each block of queries with the keys before it: the forward pass. And the number of steps."""
    q, k, *rest, count = _steps(pairs.live, pairs.kind, _most(pairs))
    return Steps(q, k, *rest), count


def by_keys(pairs: Pairs, first, span: int) -> tuple[Steps, Int[Array, ""]]:
    """Each block of keys with those of the `span` blocks of queries from `first` on that see it: the backward pass."""
    number = jnp.arange(pairs.live.shape[1])
    live = pairs.live & ((number >= first) & (number < first + span))[None, :, None]
    most = min(_most(pairs), span * pairs.live.shape[2])
    k, q, *rest, count = _steps(jnp.swapaxes(live, 1, 2), jnp.swapaxes(pairs.kind, 1, 2), most)
    return Steps(q, k, *rest), count


def _most(pairs: Pairs) -> int:
    """How many pairs there can be: the queries are at most at the end of the row."""
    queries, keys = pairs.live.shape[1:]
    return int(np.tril(np.ones((queries, keys), bool), keys - queries).sum())


def _steps(live: Bool[Array, "B G M"], kind: Int[Array, "B G M"], most: int):
    """Live pairs, group by group: (group, member, kind, is not the group's first, nor its last, number of steps). Then,
    up to the longest row's, the last one again with nothing to do.

    By sorting, not by gathers: libtpu 0.0.50 fails on gathers of constants inside some loops.
    """
    places = (jax.lax.broadcasted_iota(jnp.int32, live.shape, axis) for axis in (1, 2))
    flat = vary_alike(*(x.reshape(live.shape[0], -1) for x in ((~live).astype(jnp.int32), *places, kind)))
    _, group, member, kind = (x[:, :most] for x in jax.lax.sort(flat, dimension=1, num_keys=1, is_stable=True))
    count = jnp.sum(live, axis=(1, 2), dtype=jnp.int32)[:, None]
    number = jnp.arange(most, dtype=jnp.int32)[None]
    final = number == count - 1
    group, member = (
        jnp.where(number < count, x, jnp.sum(jnp.where(final, x, 0), axis=1, keepdims=True)) for x in (group, member)
    )
    change = jnp.pad(group[:, 1:] != group[:, :-1], ((0, 0), (1, 1)), constant_values=True)
    new, last = change[:, :-1], change[:, 1:] | final
    flags = (jnp.where(x & (number < count), 0, 1) for x in (new, last))
    return group, member, jnp.where(number < count, kind, EMPTY), *flags, jnp.max(count)
