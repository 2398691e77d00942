"""The timetable of a pipeline: interleaved 1F1B (arXiv 2104.04473 §2.2; K3's report §5.2), made before tracing.

A chunk of layers is a `stage` of the pipeline: stage P v + p is the v-th chunk of rank p. In one tick a rank does at
most one forward pass of a stage and one backward pass, each of one micro-batch; then what they found goes to the
neighbours. Forward passes go round in groups of P micro-batches, chunk by chunk, backward passes in the opposite order
of chunks, so that a message is used in the tick after it was sent:

    forward    of unit u = g P V + v P + i           at tick u + p
    backward   of unit w = g P V + (V - 1 - v) P + i at tick w + (P - 1 - p) + P V - 1        micro-batch g P + i

Each rank is idle for P - 1 of M V + P - 1 forward passes, and of as many backward passes, in steady state for none.

What travels are rows of the AttnRes bank. A stage reads the rows 0..first_row[stage], the last of which is its own
input; of these only the ones that its rank has not seen at an earlier stage arrive (`fresh`). Rows stay in a pool with
room for the most that a rank ever holds, until the backward pass of the stage that they arrived for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import numpy as np

IDLE = -1


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["micro_batch", "chunk", "rows", "fresh", "returned", "collected"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Passes:
    """Who does what in each tick, and where the rows lie. Arrays are [ticks, P] or [ticks, P, ...].

    Slots of rows that do not exist, or are not fresh, are the last slot of the pool, which is nobody's.
    """

    micro_batch: np.ndarray  # IDLE where a rank rests
    chunk: np.ndarray
    rows: np.ndarray  # [..., N] pool slots of the bank's rows
    fresh: np.ndarray  # [..., n] those of the rows that arrive with this stage, the newest (its input) first
    returned: np.ndarray  # [..., N] slots where cotangents of the older rows, of an earlier stage, are added up
    collected: np.ndarray  # [..., n] slots with what later stages of this rank added up for the fresh ones


@dataclass(frozen=True)
class Schedule:
    """`first_rows`: per stage the bank's row that is its input. `num_rows` N: rows of a bank."""

    pipe: int
    interleave: int
    micro_batches: int
    first_rows: tuple[int, ...]
    num_rows: int

    @property
    def ticks(self) -> int:
        """From the first forward pass to the last backward pass."""
        return max(self._backward_tick(*unit, 0) for unit in self._units()) + 1

    def num_fresh(self, stage: int) -> int:
        """Rows that arrive with a stage's input, itself included."""
        earlier = stage - self.pipe
        return self.first_rows[stage] - (self.first_rows[earlier] if earlier >= 0 else -1)

    @property
    def message(self) -> int:
        """Rows of the longest message."""
        return max(self.num_fresh(stage) for stage in range(self.pipe * self.interleave))

    def links(self, newest: int) -> list[tuple[int, int]]:
        """(from, to): ranks between which the `newest`-th row (0: the stage's output) of some message is fresh."""
        P, stages = self.pipe, range(1, self.pipe * self.interleave)
        return sorted({((stage - 1) % P, stage % P) for stage in stages if self.num_fresh(stage) > newest})

    def _units(self):
        """(micro-batch, chunk) in the order of the forward passes."""
        P, V, M = self.pipe, self.interleave, self.micro_batches
        return [(m, v) for g in range(0, M, P) for v in range(V) for m in range(g, min(g + P, M))]

    def _forward_tick(self, micro_batch: int, chunk: int, rank: int) -> int:
        group, i = divmod(micro_batch, self.pipe)
        return (group * self.interleave + chunk) * self.pipe + i + rank

    def _backward_tick(self, micro_batch: int, chunk: int, rank: int) -> int:
        P, V = self.pipe, self.interleave
        group, i = divmod(micro_batch, P)
        return (group * V + V - 1 - chunk) * P + i + (P - 1 - rank) + P * V - 1

    @cached_property
    def _ranks(self) -> list["_Rank"]:
        return [_Rank.run(self, rank) for rank in range(self.pipe)]

    @property
    def pool(self) -> int:
        """Rows that the fullest rank holds."""
        return max(rank.rows.most for rank in self._ranks)

    @property
    def returns(self) -> int:
        """Cotangents of rows that the fullest rank adds up over its stages; none without interleaving."""
        return max(rank.returns.most for rank in self._ranks)

    @cached_property
    def forward(self) -> Passes:
        return self._table([rank.forward for rank in self._ranks])

    @cached_property
    def backward(self) -> Passes:
        return self._table([rank.backward for rank in self._ranks])

    def _table(self, ranks: Sequence[dict]) -> Passes:
        shape, N, n = (self.ticks, self.pipe), self.num_rows, self.message
        table = Passes(
            np.full(shape, IDLE),
            np.zeros(shape, int),
            np.full((*shape, N), self.pool),
            np.full((*shape, n), self.pool),
            np.full((*shape, N), self.returns),
            np.full((*shape, n), self.returns),
        )
        for p, passes in enumerate(ranks):
            for tick, (unit, rows, returned) in passes.items():
                stage = unit[1] * self.pipe + p
                first, fresh = self.first_rows[stage], self.num_fresh(stage)
                table.micro_batch[tick, p], table.chunk[tick, p] = unit
                for row, slot in rows.items():
                    table.rows[tick, p, row] = slot
                for row, slot in returned.items():
                    if row > first - fresh:
                        table.collected[tick, p, first - row] = slot
                    else:
                        table.returned[tick, p, row] = slot
                table.fresh[tick, p, :fresh] = table.rows[tick, p, first - np.arange(fresh)]
        return table

    def in_flight(self) -> np.ndarray:
        """Units between their forward and their backward pass, [ticks, P]."""
        counts = np.zeros((self.ticks + 1, self.pipe), int)
        for unit in self._units():
            for p in range(self.pipe):
                counts[self._forward_tick(*unit, p), p] += 1
                counts[self._backward_tick(*unit, p) + 1, p] -= 1
        return np.cumsum(counts, axis=0)[:-1]

    def bubble(self) -> float:
        """Share of its time that a rank rests, if all stages cost the same: ticks with passes of one direction only
        cost only those."""
        busy = self.micro_batches * self.interleave
        return 1 - busy / np.count_nonzero((self.forward.micro_batch != IDLE).any(1))


class _Slots:
    """Slots of a pool, the lowest free one first."""

    def __init__(self):
        self.free, self.most = [], 0

    def take(self) -> int:
        if self.free:
            self.free.sort()
            return self.free.pop(0)
        self.most += 1
        return self.most - 1

    def give_back(self, slots) -> None:
        self.free += slots


class _Rank:
    """One rank's passes in the order of time, and which slots their rows take."""

    def __init__(self):
        self.rows, self.returns = _Slots(), _Slots()
        self.forward: dict[int, tuple] = {}
        self.backward: dict[int, tuple] = {}

    @staticmethod
    def run(schedule: Schedule, p: int) -> "_Rank":
        rank, held, owed = _Rank(), {}, {}  # per micro-batch: slot of each row, and of its cotangent
        P, units = schedule.pipe, schedule._units()
        forward = {schedule._forward_tick(*unit, p): unit for unit in units}
        backward = {schedule._backward_tick(*unit, p): unit for unit in units}
        for tick in range(schedule.ticks):
            if unit := forward.get(tick):
                rows, stage = held.setdefault(unit[0], {}), unit[1] * P + p
                for row in _fresh(schedule, stage):
                    rows[row] = rank.rows.take()
                rank.forward[tick] = unit, dict(rows), {}
            if unit := backward.get(tick):
                rows, returned, stage = held[unit[0]], owed.setdefault(unit[0], {}), unit[1] * P + p
                fresh = _fresh(schedule, stage)
                for row in set(rows) - set(fresh) - set(returned):
                    returned[row] = rank.returns.take()
                rank.backward[tick] = unit, dict(rows), dict(returned)
                rank.rows.give_back([rows.pop(row) for row in fresh])
                rank.returns.give_back([returned.pop(row) for row in fresh if row in returned])
        return rank


def _fresh(schedule: Schedule, stage: int) -> range:
    first = schedule.first_rows[stage]
    return range(first - schedule.num_fresh(stage) + 1, first + 1)
