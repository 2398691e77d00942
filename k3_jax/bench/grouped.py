"""`k3 bench grouped`: the grouped products of a rank's experts for a TPU that is not there, ours beside others.

Imports no JAX until it runs.
"""

import argparse
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from k3_jax.bench import report, routing
from k3_jax.bench.balance import LATENT, WIDTH
from k3_jax.config import ConfigError

if TYPE_CHECKING:
    from pallas_kernels.grouped.bench import Case, Kernel

EXPERTS, TOP_K, TOKENS = 896, 16, 8192  # K3's, and those of a rank
CAVEATS = """\
Predicted, not measured: cycles of the final schedule, its waits included, at the clock at which the matrix units reach
the vendor's peak; or the HBM traffic at full bandwidth, whichever takes longer. Waits for DMAs and for code are in
neither. Block: rows that a visit of a group reads; part: of the group's matrix, in "outer" of the gradient's. Cycles
are of {cube} x {cube} x {cube} of product and, as MXU (share of the peak), of whole blocks. Below a routing: share of
the peak with everything that is computed, mean over ranks and chunks under the plan of expert parallelism, and in
brackets the rows computed over those that there are. HBM: of one call, uniform routing. Copies: of weights into another
layout, before the call; in no share. Of "outer", kernels with branches on the counts cannot be read from a schedule."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--topology", default="tpu7x:2x2x1", metavar="NAME", help="predict for one device of it (default: tpu7x:2x2x1)"
    )
    parser.add_argument("--ranks", type=int, default=64, metavar="R", help="of the expert axis (default: 64)")
    report.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    report.check_json_argument(args.json)
    if args.ranks < 1 or EXPERTS % args.ranks:
        raise ConfigError(f"--ranks = {args.ranks}: expected a divisor of {EXPERTS}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU here is neither measured nor needed
    from k3_jax.bench.grouped_peers import entrants
    from pallas_kernels.common.dump import DumpError
    from pallas_kernels.grouped import bench

    numbers: dict[str, Any] = {"topology": args.topology, "ranks": args.ranks}
    try:
        of_ranks = {pattern: sizes_of(pattern, args.ranks) for pattern in routing.PATTERNS}
        for product, case in cases(args.ranks).items():
            numbers[product] = {}
            for competitor, target in entrants(product).items():
                report.progress(f"{product}, {competitor}: compiling for {args.topology}")
                try:
                    kernel = bench.kernel(args.topology, case, product, competitor, target)
                except DumpError as error:
                    report.progress(f"{product}, {competitor}: no schedule: {error}")
                    if competitor == "pallas":
                        return 1
                else:
                    numbers[product][competitor] = summary(kernel, case, product, of_ranks)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    report.publish(args.json, numbers, _text(args.topology, args.ranks, numbers))
    return 0


def cases(ranks: int) -> "dict[str, Case]":
    """A chunk's product with w1 or w3, its gradient for the rows, and the gradient of the weights from all rows."""
    from k3_jax.parallel.transport import CHUNKS
    from pallas_kernels.grouped.bench import Case

    rows, groups = TOKENS * TOP_K, 2 * EXPERTS // ranks
    return {
        "matmul": Case(rows // CHUNKS, LATENT, WIDTH, groups),
        "transposed": Case(rows // CHUNKS, WIDTH, LATENT, groups),
        "outer": Case(rows, LATENT, WIDTH, groups),
    }


def sizes_of(pattern: str, ranks: int) -> np.ndarray:
    """[ranks, groups]: rows of each group of each rank, under the plan."""
    import jax

    from k3_jax.parallel.expert_plan import make_plan

    report.progress(f"planning, {pattern}")
    choices = routing.made_up(pattern, ranks, TOKENS, EXPERTS, TOP_K)
    counts = np.stack([np.bincount(x.reshape(-1), minlength=EXPERTS) for x in choices]).astype(np.int32)
    return np.asarray(jax.jit(lambda counts: make_plan(counts).groups()[1])(counts))


def in_chunks(sizes: np.ndarray, rows: int) -> np.ndarray:
    """[..., G] of all rows -> [..., chunks, G] of runs of so many."""
    ends = np.cumsum(sizes, axis=-1)[..., None, :]
    first = np.arange(0, int(sizes[0].sum()), rows)[:, None]
    return np.diff(np.clip(ends - first, 0, rows), axis=-1, prepend=0)


def summary(kernel: "Kernel", case: "Case", product: str, of_ranks: dict[str, np.ndarray]) -> dict[str, Any]:
    """The numbers of one kernel."""
    by_routing = {}
    for pattern, sizes in of_ranks.items():
        computed, seconds = kernel.rows_and_seconds(in_chunks(sizes, case.R), case, product)
        by_routing[pattern] = {
            "rows_computed": computed / case.R,
            "predicted_ms": 1e3 * seconds,
            "of_peak": case.operations / kernel.chip.bf16_flops / seconds,
        }
    groups = int(np.mean(np.sum(in_chunks(of_ranks["uniform"], case.R) > 0, axis=-1)))
    return {
        "rows_per_block": kernel.blocks.rows,
        "part": list(kernel.part),
        "cycles_per_cube": kernel.cycles_per_cube,
        "mxu_share": kernel.mxu_share,
        "hbm_mb": kernel.hbm_bytes(case, product, groups) / 1e6,
        "copied_mb": kernel.copied_bytes / 1e6,
        "routing": by_routing,
    }


def _text(topology: str, ranks: int, numbers: dict[str, Any]) -> str:
    from pallas_kernels.grouped.bench import CUBE

    tables = []
    for product, case in cases(ranks).items():
        rows = [("", "block", "part", "cycles", "MXU", "HBM MB", "copies MB", *routing.PATTERNS)]
        for competitor, x in numbers[product].items():
            shares = (f"{100 * y['of_peak']:.0f} % ({y['rows_computed']:.3f})" for y in x["routing"].values())
            part = " x ".join(map(str, x["part"]))
            sizes = f"{x['hbm_mb']:.0f}", f"{x['copied_mb']:.0f}"
            cells = str(x["rows_per_block"]), part, f"{x['cycles_per_cube']:.1f}", f"{100 * x['mxu_share']:.0f} %"
            rows.append((competitor, *cells, *sizes, *shares))
        tables.append(f"{product}: {case.R} rows of {case.A}, {case.C}, {case.G} groups\n{report.columns(rows)}")
    title = f"one device of {topology}, bfloat16, {ranks} ranks of {TOKENS} tokens, {TOP_K} of {EXPERTS} experts"
    return "\n\n".join((title, *tables, CAVEATS.format(cube=CUBE)))
