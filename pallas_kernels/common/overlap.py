"""How much of its communication a scheduled TPU program hides: its ops replayed in order, each for its predicted time.

The compiler's text lists ops in the order in which the TensorCore starts them. An asynchronous transfer occupies the
links from its start on, one after the other; its `done` waits for it, and what is waited for is exposed. A transfer is
covered if a matrix product is scheduled between the two. Of a conditional the branch that takes longest is replayed: a
rank of a pipeline counts as if in every tick it had work, a layer in each slot, embedding and head. Predicted, not
measured: links and arithmetic run at the rates given; latencies and contention for HBM are left out.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from pallas_kernels.common.aot import COLLECTIVES
from pallas_kernels.common.hlo import Computation, Op, flops, hbm_bytes, read_hlo
from pallas_kernels.common.tpu import Chip
from pallas_kernels.common.traffic import trips


class Transfer(NamedTuple):
    """Bytes that a device sends in a collective, the seconds that it takes, and as what it is counted."""

    bytes: float
    seconds: float
    name: Hashable


# (op, its computation, all of them) -> None for those that are left out.
Cost = Callable[[Op, Computation, dict[str, Computation]], Transfer | None]


@dataclass
class Replay:
    """Seconds of the TensorCore's ops, of transfers, and of waiting for them; bytes sent, and of those covered, the
    others by the names of their transfers."""

    compute: float = 0.0
    transfer: float = 0.0
    exposed: float = 0.0
    sent: float = 0.0
    covered: float = 0.0
    bare: Counter[Hashable] = field(default_factory=Counter)
    products: float = 0.0  # operations of matrix products so far
    links_free: float = 0.0
    # End, products at the start, what it is; None: left out.
    pending: dict[str, tuple[float, float, Transfer] | None] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return self.compute + self.exposed

    @property
    def covered_share(self) -> float:
        return self.covered / self.sent if self.sent else 1.0

    def utilisation(self, chip: Chip) -> dict[str, float]:
        """Share of the chip's peak that the products use if transfers overlap with nothing, as scheduled, fully."""
        seconds = {
            "none": self.compute + self.transfer,
            "scheduled": self.now,
            "full": max(self.compute, self.transfer),
        }
        return {name: self.products / chip.bf16_flops / x for name, x in seconds.items()}

    @property
    def hidden_share(self) -> float:
        return 1 - self.exposed / self.transfer if self.transfer else 1.0


def replay(text: str, chip: Chip, cost: Cost) -> Replay:
    """Of HLO text. Loops run as often as their conditions say, once where these depend on data."""
    (entry,) = re.findall(r"^ENTRY %([\w.\-]+) ", text, re.MULTILINE)
    state = Replay()
    _Program(read_hlo(text), chip, cost).run(entry, state)
    return state


# What an op costs: (products, seconds) of the TensorCore, or a transfer; None: nothing.
Work = tuple[float, float] | Transfer | None


class _Program:
    """Computations, of which each op's cost is found once."""

    def __init__(self, computations: dict[str, Computation], chip: Chip, cost: Cost):
        self.computations, self.chip, self.cost = computations, chip, cost
        self.steps = functools.cache(self._steps)
        self.seconds = functools.cache(self._seconds)

    def run(self, name: str, state: Replay) -> None:
        for op, work in self.steps(name):
            if op.opcode in ("while", "conditional"):
                body, times = self._inside(op)
                for _ in range(times):
                    self.run(body, state)
            elif _communicates(op):
                _communicate(op, work, state)
            elif work:
                state.products += work[0]
                state.compute += work[1]

    def _steps(self, name: str) -> list[tuple[Op, Work]]:
        inside = self.computations[name]
        return [(op, self._work(op, inside)) for op in inside.values()]

    def _work(self, op: Op, inside: Computation) -> Work:
        if _communicates(op):  # what SparseCores do starts with an update: its call-start has no operands
            free = op.opcode == "call-start" or op.opcode.endswith("-done")
            return None if free else self.cost(op, inside, self.computations)
        if op.opcode.endswith(("-start", "-update", "-done", "while", "conditional")):  # copies run beside
            return None
        products = flops(op, inside, self.computations)
        seconds = hbm_bytes(op, inside, self.computations) / self.chip.hbm_bandwidth
        return float(products), max(seconds, products / self.chip.bf16_flops)

    def _inside(self, op: Op) -> tuple[str, int]:
        """The computation that a loop runs, and how often; the longest that a conditional may run."""
        if op.opcode == "while":
            return re.search(r"body=%([\w.\-]+)", op.rest)[1], trips(op, self.computations)
        named = re.search(r"branch_computations=\{([^}]*)\}|(true_computation=.*)", op.rest)[0]
        branches = [name for name in re.findall(r"%([\w.\-]+)", named) if name in self.computations]
        return max(branches, key=self.seconds), 1

    def _seconds(self, name: str) -> float:
        """Of a computation, if nothing overlaps."""
        total = 0.0
        for op, work in self.steps(name):
            if op.opcode in ("while", "conditional"):
                body, times = self._inside(op)
                total += times * self.seconds(body)
            elif work:
                total += work[1]
        return total


def _communicates(op: Op) -> bool:
    """By its opcode; calls, and fusions around a collective, by their names."""
    return re.sub("-(start|done)$", "", op.opcode) in COLLECTIVES or op.name.startswith(COLLECTIVES)


def _communicate(op: Op, transfer: Transfer | None, state: Replay) -> None:
    if op.opcode.endswith("-done"):
        if started := state.pending.pop(op.operands[0]):
            end, products, transfer = started
            state.exposed += max(0.0, end - state.now)
            _count(transfer, state.products > products, state)
        return
    begins = op.opcode.endswith(("-start", "-update"))
    if transfer is None:
        state.pending |= {op.name: None} if begins else {}
        return
    state.transfer += transfer.seconds
    state.links_free = max(state.now, state.links_free) + transfer.seconds
    if begins:
        state.pending[op.name] = state.links_free, state.products, transfer
    else:
        state.exposed += state.links_free - state.now
        _count(transfer, False, state)


def _count(transfer: Transfer, covered: bool, state: Replay) -> None:
    state.sent += transfer.bytes
    if covered:
        state.covered += transfer.bytes
    else:
        state.bare[transfer.name] += transfer.bytes
