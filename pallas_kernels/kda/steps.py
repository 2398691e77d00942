"""The steps of a chunked kernel over packed sequences: which rows of which chunk, and which state they belong to.

A step works on one chunk of C = 64 rows that stands where it stands in memory. Where segments bring a state each, a
chunk is visited once per segment in it, with the rows of the others masked; nothing is padded, copied or gathered.
Steps are in the order of the tokens, so a chunk's visits, and a state's, follow one another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

CHUNK = 64


class Steps(NamedTuple):
    """Scalars of each step, int32. Rows `begin` to `end` - 1 of the chunk are live.

    `reset`: the state starts from the initial state of `slot`; `flush`: it is then the final one of `slot`; `fresh`:
    the chunk was not visited before. `entry` and `last` number the segment that the carried state belongs to, and the
    chunk's last one (equal where segments do not change within a slot).
    """

    row: Int32[Array, "M"]
    chunk: Int32[Array, "M"]
    slot: Int32[Array, "M"]
    begin: Int32[Array, "M"]
    end: Int32[Array, "M"]
    reset: Int32[Array, "M"]
    flush: Int32[Array, "M"]
    fresh: Int32[Array, "M"]
    entry: Int32[Array, "M"]
    last: Int32[Array, "M"]


def steps_of_rows(batch: int, length: int, order: Int[Array, "B Tp"] | None) -> Steps:
    """Every chunk of every row once; a row has one state. `order`: `segment_order`, padded to whole chunks."""
    chunks = -(-length // CHUNK)
    step = jnp.arange(batch * chunks, dtype=jnp.int32)
    row, chunk = step // chunks, step % chunks
    entry = last = jnp.zeros_like(step)
    if order is not None:
        ends = order[:, CHUNK - 1 :: CHUNK].astype(jnp.int32)
        entry = jnp.concatenate([jnp.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1).reshape(-1)
        last = ends.reshape(-1)
    return Steps(
        row=row,
        chunk=chunk,
        slot=row,
        begin=jnp.zeros_like(step),
        end=jnp.minimum(length - chunk * CHUNK, CHUNK),
        reset=(chunk == 0).astype(jnp.int32),
        flush=(chunk == chunks - 1).astype(jnp.int32),
        fresh=jnp.ones_like(step),
        entry=entry,
        last=last,
    )


def steps_of_segments(segment_offsets: Int[Array, "N1"], length: int) -> Steps:
    """The pieces into which chunk starts and segment starts cut the tokens, in order; M = T / 64 + N + 1 of them.

    Pieces may be empty, and those before the first or after the last segment have no live rows. A segment without
    tokens has no step that flushes it.
    """
    segments, chunks = segment_offsets.shape[0] - 1, -(-length // CHUNK)
    offsets = jnp.clip(segment_offsets.astype(jnp.int32), 0, length)
    starts = jnp.sort(jnp.concatenate([CHUNK * jnp.arange(chunks, dtype=jnp.int32), offsets]))
    stops = jnp.concatenate([starts[1:], jnp.full_like(starts[:1], length)])
    chunk = jnp.minimum(starts // CHUNK, chunks - 1)
    owner = jnp.sum(starts[:, None] >= offsets[None, 1:], axis=1, dtype=jnp.int32)
    live = (starts >= offsets[0]) & (owner < segments) & (stops > starts)
    slot = jnp.minimum(owner, segments - 1)
    begin = starts - chunk * CHUNK
    zero = jnp.zeros_like(starts)
    return Steps(
        row=zero,
        chunk=chunk,
        slot=slot,
        begin=begin,
        end=jnp.where(live, stops - chunk * CHUNK, begin),
        reset=(live & (starts == offsets[slot])).astype(jnp.int32),
        flush=(live & (stops == offsets[slot + 1])).astype(jnp.int32),
        fresh=jnp.concatenate([jnp.ones_like(zero[:1]), (chunk[1:] != chunk[:-1]).astype(jnp.int32)]),
        entry=zero,
        last=zero,
    )


def segment_order(segment_ids: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Number the segments of each row 0, 1, ... in order, and which tokens are live (ids >= 0).

    Padding carries the number of the segment before it: inside a segment it does not end it. The first segment has
    number 0 wherever it starts.
    """

    def latest(left, right):
        return jnp.where(right[1], right[0], left[0]), left[1] | right[1]

    live = segment_ids >= 0
    last, seen = jax.lax.associative_scan(latest, (segment_ids, live), axis=1)
    starts = live[:, 1:] & seen[:, :-1] & (segment_ids[:, 1:] != last[:, :-1])
    starts = jnp.concatenate([jnp.zeros_like(live[:, :1]), starts], axis=1)
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32), live
