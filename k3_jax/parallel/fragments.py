"""Which positions of a row each rank holds where a mesh axis cuts rows; whatever depends on it asks a `Layout`.

A row is N = F R equal fragments, and each of the R ranks of the axis holds F of them side by side:

    context   F = 1   rank r holds fragment r
    zigzag    F = 2   rank r holds fragments r and 2R - 1 - r, so that all have the same number of causal pairs

A batch is arranged once, where it enters the model (`arranged`); everything after that works on what a rank holds.
Inside jax.shard_map fragments are rows of their own, [B F, T / N, ...] on each rank.
"""

from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from k3_jax import sharding
from pallas_kernels.common.dispatch import on_tpu

FRAGMENTS = {"context": 1, "zigzag": 2}


@dataclass(frozen=True)
class Layout:
    """`fragments` on each of `ranks` ranks of a mesh axis."""

    axis: str
    ranks: int
    fragments: int

    @property
    def total(self) -> int:
        return self.ranks * self.fragments

    def number(self, rank, slot: int):
        """Which fragment of the row this is. Odd slots run backwards over the ranks."""
        return slot * self.ranks + (self.ranks - 1 - rank if slot % 2 else rank)

    def numbers(self, rows: int) -> Int[Array, " BF"]:
        """Those of this rank's B F rows."""
        rank = jax.lax.axis_index(self.axis)
        return jnp.tile(jnp.stack([self.number(rank, slot) for slot in range(self.fragments)]), rows // self.fragments)

    def starts(self, T: int) -> list[Int[Array, ""]]:
        """The positions in a row at which this rank's fragments, of T tokens together, start."""
        rank = jax.lax.axis_index(self.axis)
        return [self.number(rank, slot) * (T // self.fragments) for slot in range(self.fragments)]

    def split(self, x: Shaped[Array, "B T *r"]) -> Shaped[Array, "BF t *r"]:
        return x.reshape(x.shape[0] * self.fragments, x.shape[1] // self.fragments, *x.shape[2:])

    def join(self, x: Shaped[Array, "BF t *r"]) -> Shaped[Array, "B T *r"]:
        return x.reshape(x.shape[0] // self.fragments, x.shape[1] * self.fragments, *x.shape[2:])

    def each(self, x: Shaped[Array, "B *r"]) -> Shaped[Array, "BF *r"]:
        """What belongs to a row, for each of its fragments."""
        return jnp.repeat(x, self.fragments, axis=0)

    def shift(self, x: Shaped[Array, "BF *r"], by: int) -> Shaped[Array, "BF *r"]:
        """The x of the fragment `by` places earlier in the row (later, if negative); zeros where there is none."""
        if sharding.pipe_size() > 1 or not on_tpu():
            return self._look_up(x, by)
        rows = x.reshape(-1, self.fragments, *x.shape[1:])
        return jnp.stack([self._arrive(rows, slot, by) for slot in range(self.fragments)], axis=1).reshape(x.shape)

    def _arrive(self, rows, to: int, by: int):
        """At most one of the slots that fragments come from has one for a given rank."""
        found = jnp.zeros_like(rows[:, to])
        for slot in range(self.fragments):
            if routes := self._routes(slot, to, by):
                found = found + jax.lax.ppermute(rows[:, slot], self.axis, routes)
        return found

    def _look_up(self, x, by: int):
        """`shift` without ppermute, for which XLA:CPU waits for all devices: of which, on a pipeline, some may be in
        another branch of the program."""
        source, row = self.numbers(len(x)) - by, jnp.arange(len(x)) // self.fragments
        there = ((source >= 0) & (source < self.total)).reshape(-1, *(1,) * (x.ndim - 1))
        found = self.gather(x)[row, jnp.clip(source, 0, self.total - 1)]
        return jnp.where(there, found, jnp.zeros_like(found))

    def _routes(self, slot: int, to: int, by: int) -> list[tuple[int, int]]:
        """(from, to) ranks of the fragments that move from one slot to another."""
        rank_of = {self.number(rank, to): rank for rank in range(self.ranks)}
        moved = ((rank, self.number(rank, slot) + by) for rank in range(self.ranks))
        return [(rank, rank_of[number]) for rank, number in moved if number in rank_of]

    def arrivals(self, by: int) -> int:
        """The most fragments that any rank gets from other ranks in `shift(x, by)`."""
        slots = range(self.fragments)
        routes = [route for slot in slots for to in slots for route in self._routes(slot, to, by)]
        return max(Counter(to for source, to in routes if source != to).values(), default=0)

    def gather(self, x: Shaped[Array, "BF *r"]) -> Shaped[Array, "B N *r"]:
        """Of all fragments of a row, in its order."""
        return self.whole(x.reshape(-1, self.fragments, *x.shape[1:]))

    def whole(self, x: Shaped[Array, "B t *r"]) -> Shaped[Array, "B T *r"]:
        """A whole row from this rank's part of it."""
        return self.in_order(jax.lax.all_gather(x, self.axis, axis=1, tiled=True))

    def pick(self, x: Shaped[Array, "BF *r"], chosen: Bool[Array, " BF"]) -> Shaped[Array, "B *r"]:
        """x of the one chosen fragment of each row, the same on all ranks."""
        kept = jnp.where(chosen.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))
        return jax.lax.psum(kept.reshape(-1, self.fragments, *x.shape[1:]).sum(1), self.axis)

    def in_order(self, x: Shaped[Array, "B T *r"]) -> Shaped[Array, "B T *r"]:
        """A whole row from what the ranks hold, one rank after the other."""
        parts = x.reshape(x.shape[0], self.ranks, self.fragments, -1, *x.shape[2:])
        slots = [parts[:, ::-1, slot] if slot % 2 else parts[:, :, slot] for slot in range(self.fragments)]
        return jnp.concatenate(slots, axis=1).reshape(x.shape)

    def held(self, x: Shaped[Array, "*b T"]) -> Shaped[Array, "*b t"]:
        """This rank's part of a whole row."""
        parts = x.reshape(*x.shape[:-1], self.total, -1)[..., self.numbers(self.fragments), :]
        return parts.reshape(*x.shape[:-1], -1)


def layout_in_use() -> Layout | None:
    """Of the mesh that is set; None where rows are whole."""
    axis = sharding.axis_of("T")
    return Layout(axis, sharding.size_of("T"), FRAGMENTS[axis]) if axis else None


def arranged(x: Shaped[Array, "*m B T"]) -> Shaped[Array, "*m B T"]:
    """Rows in order -> as the ranks hold them; of one micro-batch or of several."""
    layout, micro_batches = layout_in_use(), "_" * (x.ndim - 2)
    if layout is None:
        return sharding.place(x, sharding.active(f"{micro_batches}BT"))
    x = sharding.place(x, sharding.active(f"{micro_batches}BS"))
    return sharding.local(layout.held, (f"{micro_batches}BS",), f"{micro_batches}BT")(x)


def whole(x: Shaped[Array, "B T *r"], letters: str) -> Shaped[Array, "B T *r"]:
    """Rows as the ranks hold them -> all of them in order on every rank. `letters`: of the result, as "BS_"."""
    layout, x = layout_in_use(), sharding.place(x, sharding.active(letters))
    return sharding.local(layout.in_order, (letters,), letters)(x) if layout else x
