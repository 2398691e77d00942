"""What a grouped product computes, in order: each group visits the blocks of rows that hold any of its own.

A block at the border of two groups is visited by both. A visit computes the rows between its first and its last one in
units; their number, in binary, says which windows: 5 units are a window of 4 and a window of 1. So a border costs
about one unit and not one block, in windows that are as large as possible, for any counts and with static shapes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from pallas_kernels.common import tpu

MOST = 1024  # rows of a block
# A product needs as many cycles to fill and drain matrix units of 128 x 128, which take four times as long for its
# rows: there a quarter of the rows is as good, and the kernel's code a quarter as long.
NARROW = {tpu.V5P.device_kind: MOST // 4}


@dataclass(frozen=True)
class Blocks:
    """Blocks of `rows`, which are a power of 2 times `unit`."""

    rows: int
    unit: int

    @classmethod
    def of(cls, R: int, unit: int, device_kind: str) -> "Blocks":
        """For R rows on a kind of device: as large as they are worth."""
        rows, most = unit, NARROW.get(device_kind, MOST)
        while rows < min(R, most):
            rows *= 2
        return cls(rows, unit)

    @property
    def windows(self) -> tuple[int, ...]:
        """Units of each, largest first."""
        units = self.rows // self.unit
        return tuple(1 << bit for bit in reversed(range(units.bit_length())))


class Visits(NamedTuple):
    """Rows `start` to `end` - 1 of a block are the group's, and lie in `units` units from the one of `start` on."""

    group: Int32[Array, " V"]
    block: Int32[Array, " V"]
    start: Int32[Array, " V"]
    end: Int32[Array, " V"]
    units: Int32[Array, " V"]


def visits_of(sizes: Int[Array, " G"], R: int, blocks: Blocks, least: int = 0) -> tuple[Visits, Int[Array, ""]]:
    """The visits of R rows, sorted by group, and how many of the V = R / rows + G - 1 there are.

    `least` = 1: a group without rows visits a block too, and computes nothing there.
    """
    rows, G = blocks.rows, sizes.shape[0]
    count = -(-R // rows)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = starts // rows
    number = jnp.where(sizes > 0, (ends - 1) // rows - first + 1, least)
    until = jnp.cumsum(number)
    visit = jnp.arange(count + G - 1 + least)
    group = jnp.minimum(jnp.searchsorted(until, visit, side="right", method="compare_all"), G - 1)
    # Not looked up by gathers, which are serial on a TPU.
    of_group = lambda table: jnp.sum(jnp.where(group[:, None] == jnp.arange(G)[None], table[None], 0), axis=1)  # noqa: E731
    block = jnp.minimum(of_group(first - until + number) + visit, count - 1)
    start, end = (jnp.clip(of_group(edge) - block * rows, 0, rows) for edge in (starts, ends))
    units = jnp.where(end > start, -(-end // blocks.unit) - start // blocks.unit, 0)
    return Visits(*(x.astype(jnp.int32) for x in (group, block, start, end, units))), until[-1].astype(jnp.int32)
