"""Timing several implementations of one thing fairly: checked first, then run in turn on the same inputs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pallas_kernels.common.testing import relative_rms

WARM_UP = 2
LEAST_RUNS, SECONDS_EACH = 3, 20.0  # who has taken that long has run often enough
Outputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Contestant:
    """`run` executes once, to the end; `outputs` turns what it returns into arrays by name."""

    name: str
    run: Callable[[], Any]
    outputs: Callable[[Any], Outputs]
    compile_seconds: float | None = None


@dataclass
class Samples:
    """Seconds of every run: on the clock, and of all threads of this process."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add_run(self, run: Callable[[], Any]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def summary(self, contestant: Contestant, token_heads: int) -> dict[str, float | int | None]:
        return {
            "min_ms": 1e3 * min(self.wall),
            "median_ms": 1e3 * statistics.median(self.wall),
            "cpu_ms": 1e3 * min(self.cpu),
            "ns_per_token_head": 1e9 * min(self.wall) / token_heads,
            "compile_s": contestant.compile_seconds,
            "runs": len(self.wall),
        }


def errors(contestant: Contestant, expected: Outputs) -> dict[str, float]:
    """Relative RMS error of every output, against max(its norm, 1e-6 of the norm of all together)."""
    actual = contestant.outputs(contestant.run())
    floor = 1e-6 * float(np.sqrt(sum(np.linalg.norm(x) ** 2 for x in expected.values())))
    return {name: relative_rms(actual[name], x, floor=floor) for name, x in expected.items()}


def run_in_turn(contestants: Sequence[Contestant], repeats: int) -> list[Samples]:
    """ABAB..., after a warm-up of each; slow ones drop out early."""
    for contestant in contestants:
        for _ in range(WARM_UP if contestant.compile_seconds is not None else 0):
            contestant.run()
    samples = [Samples() for _ in contestants]
    for _ in range(repeats):
        for contestant, sample in zip(contestants, samples, strict=True):
            if len(sample.wall) < LEAST_RUNS or sum(sample.wall) < SECONDS_EACH:
                sample.add_run(contestant.run)
    return samples
