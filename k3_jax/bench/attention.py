"""`k3 bench attention`: attention of Gated MLA for a TPU that is not there, beside JAX's Splash kernel.

Imports no JAX until it runs.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from k3_jax.bench import report
from k3_jax.config import ConfigError

if TYPE_CHECKING:
    from pallas_kernels.attention.bench import Case
    from pallas_kernels.common.schedule import Schedule

SHAPE, COMPETITORS = "1,8192,8", ("pallas", "splash")
CAVEATS = """\
Predicted, not measured: bundles of the final schedule at 1.43 per ns (a rate for TPU7x), or the HBM traffic at full
bandwidth, whichever takes longer. Every pair of blocks on or below the diagonal is counted as a step without a mask;
steps above it, which Splash has and skips, are free here. XLA's ops around the calls are in bundles and traffic.
Traffic is operands and results, once per call: that keys are read again for every block of queries is not in it.
Shares are of slots in the steady steps of the kernels."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", default="tpu7x:2x2x1", metavar="NAME", help="predict for one device of it (default: tpu7x:2x2x1)"
    )
    parser.add_argument(
        "--shape",
        type=report.integers,
        default=report.integers(SHAPE),
        metavar="B,T,H",
        help=f"batch, tokens, heads (default: {SHAPE})",
    )
    report.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    report.check_json_argument(args.json)
    if len(args.shape) != 3:
        raise ConfigError(f"--shape = {','.join(map(str, args.shape))}: expected B,T,H")
    os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU here is neither measured nor needed
    from pallas_kernels.attention.bench import TABLE, Case
    from pallas_kernels.common.dump import DumpError
    from pallas_kernels.common.schedule import schedule_of

    numbers: dict[str, Any] = {"shape": dict(zip("BTH", args.shape, strict=True))}
    try:
        case = Case(*args.shape)
        for backward, direction in enumerate(report.DIRECTIONS):
            numbers[direction] = {}
            for competitor in COMPETITORS:
                report.progress(f"{direction}, {competitor}: compiling for {args.topology}, which may take minutes")
                schedule = schedule_of(
                    "pallas_kernels.attention.bench:lower", table=TABLE[competitor], topology=args.topology,
                    shape=list(args.shape), competitor=competitor, backward=bool(backward),
                )  # fmt: skip
                numbers[direction][competitor] = summary(schedule, case, competitor)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    except DumpError as error:
        print(f"k3 bench attention: {direction}, {competitor} does not compile: {error}", file=sys.stderr)
        return 1
    report.publish(args.json, numbers, _text(case, args.topology, numbers))
    return 0


def summary(schedule: "Schedule", case: "Case", competitor: str) -> dict[str, float | None]:
    """The numbers of one program, XLA's ops included."""
    from pallas_kernels.common.schedule import BUNDLES_PER_SECOND

    steps = case.steps(competitor)
    bundles = sum(op.code.step.bundles * steps if op.kind == "pallas" else op.bundles for op in schedule.ops)
    rate, traffic = BUNDLES_PER_SECOND.get(schedule.chip.name), schedule.hbm_bytes / schedule.chip.hbm_bandwidth
    return {
        "bundles_per_token_head": bundles / (case.B * case.T * case.H),
        "hbm_mb": schedule.hbm_bytes / 1e6,
        "spill_share": schedule.steady.share("SPILL"),
        "fill_share": schedule.steady.share("FILL"),
        "mxu_share": schedule.steady.share("MXU"),
        "predicted_ms": 1e3 * max(bundles / rate, traffic) if rate else None,
    }


def _text(case: "Case", topology: str, numbers: dict[str, Any]) -> str:
    from pallas_kernels.attention.bench import operations
    from pallas_kernels.common import tpu

    rows = [report.PREDICTED]
    for backward, direction in enumerate(report.DIRECTIONS):
        rows += [report.predicted_row(f"{direction} {name}", x) for name, x in numbers[direction].items()]
        floor = 1e3 * operations(case, bool(backward)) / tpu.chip(topology).bf16_flops
        rows.append((f"{direction} roofline: matrix products", *[""] * 5, f"{floor:.3f}"))
    sizes = f"B,T,H = {case.B},{case.T},{case.H} in bfloat16, widths {case.N} + {case.R}, {case.V}"
    return f"one device of {topology}, {sizes}\n\n{report.columns(rows)}\n\n{CAVEATS}"
