"""Kimi Delta Attention on this machine's TPU: device time, and what it is of the chip's two roofs.

Checked first, on the TPU, in a case that the recurrence in float64 has the memory for. Not run anywhere yet: no TPU was
at hand when this was written; tests run it on a CPU that calls itself a TPU.
"""

import dataclasses
import statistics
import sys
from typing import Any

import jax
import numpy as np

from k3_jax.bench import kda_measured, report
from k3_jax.bench.measure import errors, run_in_turn
from k3_jax.config import ConfigError
from pallas_kernels.common import tpu
from pallas_kernels.kda.bench import Case, compulsory_bytes, make_inputs, operations

IMPLEMENTATIONS = ("pallas", "xla")
CALLS = 10  # dispatched before one is waited for: the device, not the host, then sets the time
LONGEST, MOST_HEADS = 512, 2  # of the case that is checked


def run(case: Case, repeats: int, json_place: str | None) -> int:
    device, chip, cpu = _devices()
    ends = np.minimum(np.cumsum(case.segments, dtype=int), LONGEST)
    short = tuple(np.diff(ends, prepend=0).tolist())
    length = sum(short) if short else min(case.T, LONGEST)
    small = dataclasses.replace(case, B=1, T=length, H=min(case.H, MOST_HEADS), segments=short)
    inputs = make_inputs(small)
    for backward, direction in enumerate(report.DIRECTIONS):
        report.progress(f"{direction}: checking against a recurrence in float64")
        entrants = [kda_measured.ours(small, inputs, bool(backward), name) for name in IMPLEMENTATIONS]
        with jax.default_device(cpu):
            expected = kda_measured.exact(small, inputs, bool(backward))
        found = [errors(entrant, expected) for entrant in entrants]
        if lines := kda_measured.failures(direction, entrants, found, kda_measured.TOLERANCE[case.dtype]):
            print("\n".join(f"k3 bench kda: {line}; nothing was timed" for line in lines), file=sys.stderr)
            return 1
    inputs = make_inputs(case)
    numbers: dict[str, Any] = {"shape": case.sizes, "dtype": case.dtype, "segments": list(case.segments)}
    for backward, direction in enumerate(report.DIRECTIONS):
        report.progress(f"{direction}: timing {', '.join(IMPLEMENTATIONS)} in turn on {device.device_kind}")
        entrants = [kda_measured.ours(case, inputs, bool(backward), name, CALLS) for name in IMPLEMENTATIONS]
        numbers[direction] = {
            entrant.name: summary(case, bool(backward), chip, sample.wall)
            for entrant, sample in zip(entrants, run_in_turn(entrants, repeats), strict=True)
        }
    report.publish(json_place, numbers, f"measured on one {device.device_kind}, {case}\n{_text(numbers)}")
    return 0


def _devices() -> tuple[jax.Device, tpu.Chip, jax.Device]:
    """The TPU, its facts, and a CPU for the check. Before anything is compiled."""
    try:
        return jax.devices()[0], tpu.chip(jax.devices()[0].device_kind), jax.devices("cpu")[0]
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"this TPU: {error} (JAX_PLATFORMS must have cpu, for the check)") from None


def summary(case: Case, backward: bool, chip: tpu.Chip, seconds: list[float]) -> dict[str, Any]:
    """Per call. The roofs are the chip's peaks: of bfloat16 products, and of arguments and results moved once."""
    per_call = sorted(x / CALLS for x in seconds)
    median = statistics.median(per_call)
    rate = operations(case, backward) / median
    return {
        "min_ms": 1e3 * per_call[0],
        "median_ms": 1e3 * median,
        "tflops": rate / 1e12,
        "of_flops_roof": rate / chip.bf16_flops,
        "of_hbm_roof": compulsory_bytes(case, backward) / chip.hbm_bandwidth / median,
    }


def _text(numbers: dict[str, Any]) -> str:
    rows = [("", "min ms", "median ms", "TFLOP/s", "of products' roof", "of HBM's roof")]
    for direction in report.DIRECTIONS:
        for name, x in numbers[direction].items():
            shares = (f"{100 * x[roof]:.1f} %" for roof in ("of_flops_roof", "of_hbm_roof"))
            times = f"{x['min_ms']:.3f}", f"{x['median_ms']:.3f}", f"{x['tflops']:.1f}"
            rows.append((f"{direction} {name}", *times, *shares))
    return report.columns(rows)
