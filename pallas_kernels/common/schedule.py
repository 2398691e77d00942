"""The static instruction schedule of a compiled TPU program: bundles per op and per grid step, and use of the slots.

    schedule = schedule_of("tests.aot.programs:lower_walk", topology="tpu7x:2x2x1")
    for op in schedule.pallas:
        print(op.name, op.code.steps, op.code.step.bundles, op.code.step.share("SPILL"))
    print(schedule.work.bundles, schedule.hbm_bytes)

A bundle is one VLIW instruction; `cycles` adds the waits that the compiler wrote between them. Neither holds what is
decided at run time: waiting for DMAs, links and other cores, conflicts of banks. So bundles rank variants of a kernel
and catch regressions, and a time made of them is a prediction.

As a command: python -m pallas_kernels.common.schedule MODULE:FUNCTION NAME=JSON ...
"""

import json
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels.common import tpu
from pallas_kernels.common.bundles import called_ops, execute, read_bundles
from pallas_kernels.common.dump import FINAL, PACKED, TOP, Dump, DumpError, compile_program
from pallas_kernels.common.hlo import Op, hbm_bytes, read_hlo

# Published times of TPU7x kernels divided by their bundle counts cluster here; of five points one is 2x off. The other
# chips have no calibration.
BUNDLES_PER_SECOND = {"tpu7x": 1.43e9}
BRANCH_DELAY = {"v5p": 4, "v6e": 4, "tpu7x": 6}  # bundles executed behind a branch
CALLS_AND_LOOPS = "(calls and loops)"
_SHOWN = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL")


@dataclass(frozen=True)
class Work:
    """Executed bundles, cycles with the scheduled waits, and slots used, by name; `capacity` is slots per bundle.

    VLOAD counts FILL too and VSTORE counts SPILL, which save and reload registers.
    """

    bundles: int = 0
    cycles: int = 0
    slots: Counter[str] = field(default_factory=Counter)
    capacity: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: "Work") -> "Work":
        capacity = self.capacity or other.capacity
        return Work(self.bundles + other.bundles, self.cycles + other.cycles, self.slots + other.slots, capacity)

    def __mul__(self, times: int) -> "Work":
        slots = Counter({name: times * count for name, count in self.slots.items()})
        return Work(times * self.bundles, times * self.cycles, slots, self.capacity)

    def share(self, slot: str) -> float:
        """Use of a slot relative to its capacity in the bundles; over 1 where an instruction keeps it for several."""
        return self.slots[slot] / (self.capacity[slot] * self.bundles) if self.bundles else 0.0


@dataclass(frozen=True)
class Code:
    """What is executed in one call of an op.

    steps       of its grid; 1 where there is no loop.
    step        a steady step: what most steps execute, without what only the first or the last does.
    total       the whole call.
    undecided   bundles of `step` that are executed or not depending on data. They are counted.
    """

    steps: int
    step: Work
    total: Work
    undecided: int


@dataclass(frozen=True)
class OpSchedule:
    """An HLO op and how often the program calls it. `kind` is "pallas" or the opcode.

    `hbm_bytes` are the operands and results of one call, `vmem_bytes` what the compiler reserves while it runs.
    """

    name: str
    kind: str
    calls: int
    code: Code
    hbm_bytes: int
    vmem_bytes: int

    @property
    def bundles(self) -> int:
        """Executed in all calls."""
        return self.calls * self.code.total.bundles


@dataclass(frozen=True)
class Schedule:
    """All ops of a program that execute bundles; `hbm_bytes` holds also what copies and SparseCores move."""

    chip: tpu.Chip
    ops: tuple[OpSchedule, ...]
    hbm_bytes: int

    @property
    def pallas(self) -> tuple[OpSchedule, ...]:
        return tuple(op for op in self.ops if op.kind == "pallas")

    @property
    def work(self) -> Work:
        """Everything executed."""
        return sum((op.code.total * op.calls for op in self.ops), Work())

    @property
    def steady(self) -> Work:
        """All steady steps of the Pallas calls; everything where there are none."""
        if not self.pallas:
            return self.work
        return sum((op.code.step * (op.code.steps * op.calls) for op in self.pallas), Work())

    @property
    def predicted_seconds(self) -> float | None:
        """The longer of bundles at a rough rate and HBM traffic at full bandwidth; None for a chip without a rate."""
        rate = BUNDLES_PER_SECOND.get(self.chip.name)
        return max(self.work.bundles / rate, self.hbm_bytes / self.chip.hbm_bandwidth) if rate else None


def schedule_of(
    target: str, *, timeout: int = 1200, table: int | None = None, length: int | None = None, **arguments: Any
) -> Schedule:
    """The schedule of the program that a function lowers: "module:function" or "file.py:function".

    The function is called with `arguments`, which must be of JSON's types, in a process of its own and returns a
    `jax.stages.Lowered`, as of `aot.lower_for`. `table` is the value assumed for every word of scalar-prefetch
    operands, `length` that of lengths of grids that are operands; None leaves what depends on them undecided. Raises
    ValueError if the function raises, DumpError if the compiler does, or takes more than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="k3-schedule-") as folder:
        compile_program(target, arguments, Path(folder), timeout)
        return read_schedule(Dump(Path(folder)), table, length)


def read_schedule(dump: Dump, table: int | None = None, length: int | None = None) -> Schedule:
    """The schedule of a program that `dump.compile_program` has compiled."""
    computations, labels, calls = read_hlo(dump.hlo), dump.label_of_op(), _calls(dump)
    code: dict[str, Code] = {}
    ops, traffic = [], 0
    for computation in computations.values():
        # What has no bundles, as an asynchronous copy, runs as often as the ops around it.
        often = max((calls[name] for name in computation), default=0)
        for op in computation.values() if often else ():
            moved = hbm_bytes(op, computation, computations)
            traffic += moved * (calls[op.name] or often)
            if calls[op.name]:
                label = labels.get(op.name, op.name)
                if label not in code:
                    code[label] = _read_code(dump, label, table, length)
                ops.append(_op_schedule(op, calls[op.name], code[label], moved))
    ops.append(OpSchedule(CALLS_AND_LOOPS, "program", 1, _read_code(dump, TOP, table), 0, 0))
    return Schedule(dump.chip, tuple(ops), traffic)


def _op_schedule(op: Op, calls: int, code: Code, moved: int) -> OpSchedule:
    return OpSchedule(op.name, "pallas" if op.is_pallas else op.opcode, calls, code, moved, op.vmem_bytes)


def _calls(dump: Dump) -> Counter[str]:
    """How often the top-level program calls each op."""
    text = dump.text(TOP, PACKED)
    counts = execute(read_bundles(text), BRANCH_DELAY[dump.chip.name]).counts
    calls: Counter[str] = Counter()
    for count, names in zip(counts, called_ops(text), strict=True):
        calls.update(dict.fromkeys(names, count))
    return calls


def _read_code(dump: Dump, label: str, table: int | None, length: int | None = None) -> Code:
    bundles = read_bundles(dump.text(label, PACKED))
    issued = issued_of(bundles, read_bundles(dump.text(label, FINAL)))
    capacity, slots = dump.slots(label)
    if len(slots) != len(bundles):
        raise DumpError(f"{label}: {len(bundles)} bundles, but slots of {len(slots)}")
    execution = execute(bundles, BRANCH_DELAY[dump.chip.name], table, length)

    def work(counts: np.ndarray) -> Work:
        used = Counter(dict(zip(capacity, (counts @ slots).tolist(), strict=True)))
        return Work(int(counts @ issued), int(counts.sum()), used, capacity)

    uncertain = np.zeros(len(bundles), int)
    for first, end in execution.undecided:
        uncertain[first:end] = 1
    steady = np.array(execution.steady)
    return Code(execution.steps, work(steady), work(np.array(execution.counts)), int((steady * uncertain) @ issued))


def issued_of(packed: list[str], final: list[str]) -> np.ndarray:
    """1 for every bundle of PACKED that is in FINAL too: all instructions, and some of the waits between them."""
    issued, position = np.zeros(len(packed), int), 0
    for i, bundle in enumerate(packed):
        if position < len(final) and bool(bundle) == bool(final[position]):
            issued[i], position = 1, position + 1
    if position != len(final) or not all(issued[i] for i, bundle in enumerate(packed) if bundle):
        raise DumpError(f"{PACKED} and {FINAL} do not hold the same instructions")
    return issued


def table_of(schedule: Schedule, least: float = 0.001) -> str:
    """The ops as text, most bundles first; those below the share `least` of all bundles are left out."""
    rows = [("op", "calls", "steps", "per step", "cycles", "bundles", "HBM MB", "MiB", *_SHOWN)]
    for op in sorted(schedule.ops, key=lambda op: -op.bundles):
        if op.bundles >= least * schedule.work.bundles:
            counts = (op.calls, op.code.steps, op.code.step.bundles, op.code.step.cycles, op.bundles)
            size = f"{op.calls * op.hbm_bytes / 1e6:.1f}", f"{op.vmem_bytes / tpu.MIB:.1f}"
            shares = (f"{100 * op.code.step.share(slot):.0f}%" for slot in _SHOWN)
            rows.append((op.name[:32], *map(str, counts), *size, *shares))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


if __name__ == "__main__":
    values = {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
    print(table_of(schedule_of(sys.argv[1], **values)))
