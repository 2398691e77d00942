"""The steps of a blockwise causal kernel: which blocks of queries and keys meet, in a flat list without the empty ones.

The list is made on the device from the segments, so that packed documents cost what they contain: the grid is as long
as the longest row's list.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

# What a step does.
EMPTY, MASKED, FULL = 0, 1, 2
BITS = {"q": 12, "k": 12, "kind": 2, "continued": 1, "continues": 1}


class Steps(NamedTuple):
    """Each step's fields, int32, which travel as one word: the scalar memory of a core holds some 200,000.

    q, k        blocks of queries and of keys.
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
    return _steps(pairs, q, k, q, len(q))


def by_keys(pairs: Pairs, first, span: int) -> tuple[Steps, Int[Array, ""]]:
    """Each block of keys with those of the `span` blocks of queries from `first` on that see it: the backward pass."""
    blocks = pairs.live.shape[1]
    k, q = np.triu_indices(blocks)
    inside = np.arange(blocks)
    inside = (inside >= first) & (inside < first + span)
    return _steps(pairs._replace(live=pairs.live & inside[None, :, None]), q, k, k, min(len(q), span * blocks))


def _steps(pairs: Pairs, q, k, group, most: int) -> tuple[Steps, Int[Array, ""]]:
    """Live pairs in the order given, at most so many; then, up to the longest row's, the last one again with nothing to
    do."""
    live = pairs.live[:, q, k]
    count = jnp.sum(live, axis=1, keepdims=True, dtype=jnp.int32)
    number = jnp.arange(most, dtype=jnp.int32)[None]
    order = jnp.argsort(~live, axis=1, stable=True)[:, :most]
    order = jnp.take_along_axis(order, jnp.minimum(number, count - 1), axis=1)
    kind = jnp.where(pairs.full[:, q, k], FULL, MASKED)
    kind = jnp.where(number < count, jnp.take_along_axis(kind, order, axis=1), EMPTY)
    q, k, group = (jnp.asarray(x, jnp.int32)[order] for x in (q, k, group))
    change = jnp.pad(group[:, 1:] != group[:, :-1], ((0, 0), (1, 1)), constant_values=True)
    new = change[:, :-1]
    last = change[:, 1:] | (number == count - 1)
    flags = (jnp.where(x & (number < count), 0, 1) for x in (new, last))
    return Steps(q, k, kind, *flags), jnp.max(count)
