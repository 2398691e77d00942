"""Kimi Delta Attention on this machine's CPU: the XLA form and the recurrence, in turn with the peers installed.

Everybody gets the same arguments and is compared with a recurrence in float64 before anything is timed.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3_jax.bench import report
from k3_jax.bench.kda_peers import peers
from k3_jax.bench.measure import Contestant, Outputs, errors, run_in_turn
from k3_jax.config import ConfigError
from pallas_kernels.common.aot import no_disk_cache
from pallas_kernels.kda.bench import Case, forward, forward_backward, make_inputs

OURS = ("xla", "reference")
GRADIENTS = ("q", "k", "v", "g", "beta")
# Relative RMS of the output, and ten times as much of gradients.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def run(case: Case, repeats: int, baseline: str | None, json_place: str | None) -> int:
    _check_memory(case)
    inputs = make_inputs(case)
    entrants, deviations = {}, {}
    for backward, direction in enumerate(report.DIRECTIONS):
        report.progress(f"{direction}: compiling, and checking against a recurrence in float64")
        with no_disk_cache():
            entered = [ours(case, inputs, bool(backward), name) for name in (*OURS, *filter(None, [baseline]))]
            expected = exact(case, inputs, bool(backward))
        entrants[direction] = entered + peers(case, inputs, bool(backward))
        deviations[direction] = [errors(entrant, expected) for entrant in entrants[direction]]
    if lines := [x for d in entrants for x in failures(d, entrants[d], deviations[d], TOLERANCE[case.dtype])]:
        print("\n".join(f"k3 bench kda: {line}; nothing was timed" for line in lines), file=sys.stderr)
        return 1
    numbers: dict[str, Any] = {"shape": case.sizes, "dtype": case.dtype, "segments": list(case.segments)}
    for direction, contestants in entrants.items():
        report.progress(f"{direction}: timing {', '.join(entrant.name for entrant in contestants)} in turn")
        samples = run_in_turn(contestants, repeats)
        numbers[direction] = {
            entrant.name: {"error": max(found.values())} | sample.summary(entrant, case.token_heads)
            for entrant, found, sample in zip(contestants, deviations[direction], samples, strict=True)
        }
    report.publish(json_place, numbers, _text(case, numbers))
    return 0


def _check_memory(case: Case) -> None:
    """The recurrence keeps the state of every token for its backward pass, in float64 where it is the judge."""
    states = 8 * case.token_heads * case.K * case.V
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 2 * states > memory:
        raise ConfigError(
            f"--shape = {case}: expected a smaller one: the recurrence that checks the gradients keeps "
            f"{states / 1e9:.0f} GB of states, and this machine has {memory / 1e9:.0f} GB"
        )


def _function(case: Case, backward: bool, implementation: str) -> Callable:
    return (forward_backward if backward else forward)(case, implementation)


def _arguments(inputs: dict[str, np.ndarray], backward: bool) -> list[np.ndarray]:
    return [x for name, x in inputs.items() if backward or name != "do"]


def _named(results: Any, backward: bool) -> Outputs:
    """The output, and the gradients, of what `_function` returns."""
    gradients = dict(zip(GRADIENTS, results[1], strict=True)) if backward else {}
    return {name: np.asarray(x) for name, x in {"o": results[0], **gradients}.items()}


def ours(case: Case, inputs: dict[str, np.ndarray], backward: bool, implementation: str, calls: int = 1) -> Contestant:
    """Running it dispatches `calls` calls and waits for the last."""
    arguments = [jnp.asarray(x) for x in _arguments(inputs, backward)]
    started = time.perf_counter()
    compiled = jax.jit(_function(case, backward, implementation)).lower(*arguments).compile()
    seconds = time.perf_counter() - started

    def run():
        for _ in range(calls):
            results = compiled(*arguments)
        return jax.block_until_ready(results)

    return Contestant(implementation, run, lambda results: _named(results, backward), seconds)


def exact(case: Case, inputs: dict[str, np.ndarray], backward: bool) -> Outputs:
    """The recurrence in float64."""
    with jax.enable_x64(True):
        arguments = [jnp.asarray(x.astype(np.float64)) for x in _arguments(inputs, backward)]
        return _named(jax.jit(_function(case, backward, "reference"))(*arguments), backward)


def failures(
    direction: str, entrants: list[Contestant], deviations: list[dict[str, float]], tolerance: float
) -> list[str]:
    """A line for every error that is too large, NaN included."""
    lines = []
    for entrant, found in zip(entrants, deviations, strict=True):
        for name, error in found.items():
            allowed = tolerance if name == "o" else 10 * tolerance
            if not error <= allowed:
                what = "the output" if name == "o" else f"the gradient of {name}"
                lines.append(f"{entrant.name}, {direction}: {what} is off by {error:.1e}, allowed {allowed:.0e}")
    return lines


def _text(case: Case, numbers: dict[str, Any]) -> str:
    rows = [("", "min ms", "median ms", "CPU ms", "ns/token/head", "compile s", "runs", "error")]
    for direction in report.DIRECTIONS:
        for name, x in numbers[direction].items():
            times = (f"{x[key]:.3f}" for key in ("min_ms", "median_ms", "cpu_ms"))
            compile_time = "-" if x["compile_s"] is None else f"{x['compile_s']:.2f}"
            rate = f"{x['ns_per_token_head']:.1f}"
            rows.append((f"{direction} {name}", *times, rate, compile_time, str(x["runs"]), f"{x['error']:.1e}"))
    return f"measured on {os.cpu_count()} CPUs, {case}\n{report.columns(rows)}"
