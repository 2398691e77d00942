"""How much of its communication a scheduled TPU program hides: its ops replayed in order, each for its predicted time.

The compiler's text lists ops in the order in which the TensorCore starts them. An asynchronous transfer occupies the
links from its start on, one after the other; its `done` waits for it, and what is waited for is exposed. A transfer is
covered if a matrix product is scheduled between the two. Predicted, not measured: links and arithmetic run at the rates
given; latencies and contention for HBM are left out.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pallas_kernels.common.aot import COLLECTIVES
from pallas_kernels.common.hlo import Computation, Op, flops, hbm_bytes, read_hlo
from pallas_kernels.common.tpu import Chip
from pallas_kernels.common.traffic import trips

# (op, its computation, all of them) -> bytes that a device sends in a collective, and the seconds that takes; zeros for
# those that are left out.
Cost = Callable[[Op, Computation, dict[str, Computation]], tuple[float, float]]


@dataclass
class Replay:
    """Seconds of the TensorCore's ops, of transfers, and of waiting for them; bytes sent, and of those covered, the
    others by kind of collective."""

    compute: float = 0.0
    transfer: float = 0.0
    exposed: float = 0.0
    sent: float = 0.0
    covered: float = 0.0
    bare: Counter[str] = field(default_factory=Counter)
    products: float = 0.0  # operations of matrix products so far
    links_free: float = 0.0
    pending: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # end, products at the start, bytes

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
    computations = read_hlo(text)
    (entry,) = re.findall(r"^ENTRY %([\w.\-]+) ", text, re.MULTILINE)
    state = Replay()

    @functools.cache
    def steps(name: str) -> list[Step]:
        inside = computations[name]
        return [_step(op, inside, computations, chip, cost) for op in inside.values()]

    _run(steps, entry, computations, state)
    return state


# An op with what it costs: (products, seconds) of the TensorCore, (bytes, seconds) of a collective.
Step = tuple[Op, tuple[float, float]]


def _step(op: Op, inside: Computation, computations, chip: Chip, cost: Cost) -> Step:
    if op.name.startswith(COLLECTIVES):  # what SparseCores do starts with an update: its call-start has no operands
        free = op.opcode == "call-start" or op.opcode.endswith("-done")
        return op, (0.0, 0.0) if free else cost(op, inside, computations)
    if op.opcode.endswith(("-start", "-update", "-done", "while")):  # copies run beside
        return op, (0.0, 0.0)
    products = flops(op, inside, computations)
    seconds = max(hbm_bytes(op, inside, computations) / chip.hbm_bandwidth, products / chip.bf16_flops)
    return op, (float(products), seconds)


def _run(steps: Callable[[str], list[Step]], name: str, computations, state: Replay) -> None:
    for op, (amount, seconds) in steps(name):
        if op.opcode == "while":
            body = re.search(r"body=%([\w.\-]+)", op.rest)[1]
            for _ in range(trips(op, computations)):
                _run(steps, body, computations, state)
        elif op.name.startswith(COLLECTIVES):
            _communicate(op, (amount, seconds), state)
        else:
            state.products += amount
            state.compute += seconds


def _communicate(op: Op, cost: tuple[float, float], state: Replay) -> None:
    if op.opcode == "call-start":
        return
    if op.opcode.endswith("-done"):
        end, products, size = state.pending.pop(op.operands[0])
        state.exposed += max(0.0, end - state.now)
        if state.products > products:
            state.covered += size
        else:
            state.bare[_kind(op)] += size
        return
    size, seconds = cost
    state.sent += size
    state.transfer += seconds
    state.links_free = max(state.now, state.links_free) + seconds
    if op.opcode.endswith(("-start", "-update")):
        state.pending[op.name] = state.links_free, state.products, size
    else:
        state.exposed += state.links_free - state.now
        state.bare[_kind(op)] += size


def _kind(op: Op) -> str:
    return next(kind for kind in COLLECTIVES if op.name.startswith(kind))
