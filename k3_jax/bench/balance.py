"""`k3 bench balance`: the plan of expert parallelism on a given routing, beside what goes without one.

Imports no JAX until it runs.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from k3_jax.bench import report, routing
from k3_jax.config import ConfigError

if TYPE_CHECKING:
    from k3_jax.parallel.expert_plan import Plan

LATENT, WIDTH, BYTES = 3584, 3072, 2  # K3's experts in bfloat16
CAPACITY = 1.25
RUNS = 5
NOTE = f"""\
Rows of {LATENT} numbers and experts of 3 x {LATENT} x {WIDTH}, in bfloat16. Rows that stay on their rank are not moved.
Lower bound: no exact plan gets by with fewer borrowed experts on its neediest rank. Without a plan the fullest rank
sets the time; with capacity {CAPACITY} an expert drops what is above {CAPACITY} times the mean load. The planning time
is of this CPU; on a TPU it is part of the program."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=64, metavar="R", help="of the expert axis (default: 64)")
    parser.add_argument("--experts", type=int, default=896, metavar="E", help="in all (default: 896)")
    parser.add_argument("--top-k", type=int, default=16, metavar="K", help="experts per token (default: 16)")
    parser.add_argument("--tokens", type=int, default=8192, metavar="S", help="of each rank (default: 8192)")
    patterns = "; ".join(f"{name}: {what}" for name, what in routing.PATTERNS.items())
    parser.add_argument(
        "--routing",
        default="uniform",
        metavar="PATTERN",
        help=f"{patterns}; or a .npy file of choices (default: uniform)",
    )
    parser.add_argument("--plot", metavar="FILE", help="a picture of the rows per rank (.png, .pdf, .svg)")
    report.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU here is not needed
    report.progress("choosing experts")
    try:
        choices = _choices(args)
    except MemoryError:
        raise ConfigError(f"--ranks = {args.ranks}, --tokens = {args.tokens}: expected fewer for this memory") from None
    counts = np.stack([np.bincount(x.reshape(-1), minlength=args.experts) for x in choices]).astype(np.int32)
    plan, seconds = timed_plan(counts)
    numbers = {
        **{name: getattr(args, name) for name in ("ranks", "experts", "top_k", "tokens", "routing")},
        **balanced(plan), **unbalanced(counts), "planning_ms": 1e3 * seconds,
    }  # fmt: skip
    if args.plot:
        draw(plan, numbers, args.plot)
    report.publish(args.json, numbers, _text(numbers))
    return 0


def _choices(args: argparse.Namespace) -> routing.Choices:
    sizes = (args.ranks, args.tokens, args.experts, args.top_k)
    if args.routing in routing.PATTERNS:
        return routing.made_up(args.routing, *sizes)
    return routing.from_file(Path(args.routing), *sizes)


def _check(args: argparse.Namespace) -> None:
    for option in ("ranks", "experts", "top_k", "tokens"):
        if getattr(args, option) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} = {getattr(args, option)}: expected a positive integer")
    if args.experts % args.ranks:
        raise ConfigError(f"--experts = {args.experts}: expected a multiple of --ranks = {args.ranks}")
    if args.top_k > args.experts:
        raise ConfigError(f"--top-k = {args.top_k}: expected at most --experts = {args.experts}")
    if (rows := args.ranks * args.tokens * args.top_k) >= 2**31:
        raise ConfigError(f"--ranks x --tokens x --top-k = {rows}: expected less than 2^31 rows; counts are int32")
    report.check_json_argument(args.json)
    report.check_picture(args.plot)


def timed_plan(counts: np.ndarray) -> tuple["Plan", float]:
    """The plan, and the median of the seconds that it takes, compiled."""
    import jax

    from k3_jax.parallel.expert_plan import make_plan

    report.progress("planning")
    plan = jax.jit(make_plan).lower(counts).compile()
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        found = jax.block_until_ready(plan(counts))
        seconds.append(time.perf_counter() - start)
    return jax.tree.map(np.asarray, found), statistics.median(seconds)


def balanced(plan: "Plan") -> dict[str, Any]:
    """What every rank gets: each row of every rank is followed to where it is computed."""
    from k3_jax.parallel.loan import pieces_home

    moved = rows_moved(plan)
    tokens, borrowed = moved.sum(0), np.asarray(plan.lent()).sum(1)
    away = tokens - np.diagonal(moved)
    return {
        "max_tokens_per_rank": int(tokens.max()),
        "min_tokens_per_rank": int(tokens.min()),
        "max_redundant_experts": int(borrowed.max()),
        "mean_redundant_experts": float(borrowed.mean()),
        "lower_bound_redundant": lower_bound(plan.counts),
        "gradient_turns": int(pieces_home(plan)[1]),
        "rows_mb_per_rank": float(away.mean() * LATENT * BYTES / 1e6),
        "weights_mb_per_rank_max": float(borrowed.max() * 3 * LATENT * WIDTH * BYTES / 1e6),
        "weights_mb_per_rank_mean": float(borrowed.mean() * 3 * LATENT * WIDTH * BYTES / 1e6),
    }


def rows_moved(plan: "Plan") -> np.ndarray:
    """[source, destination] rows. Raises RuntimeError unless every row of every rank arrives exactly once."""
    import jax

    from k3_jax.parallel.expert_plan import sources

    R, rows = plan.counts.shape[0], int(plan.counts[0].sum())
    find = jax.jit(sources, static_argnums=2)
    moved, arrivals = np.zeros((R, R), np.int64), np.zeros(R * rows, np.int8)
    sizes = np.asarray(plan.groups()[1]).sum(1)
    for rank in range(R):
        source, place = (np.asarray(x)[: sizes[rank]] for x in find(plan, rank, int(sizes[rank])))
        moved[:, rank] = np.bincount(source, minlength=R)
        arrivals[source.astype(np.int64) * rows + place] += 1
    if (arrivals != 1).any():
        raise RuntimeError(f"{(arrivals != 1).sum()} rows do not arrive exactly once: the plan is wrong")
    return moved


def lower_bound(counts: np.ndarray) -> int:
    """A rank with too few rows at home needs enough experts of others to fill it, even if it got all their rows."""
    R, E = counts.shape
    load, home = counts.sum(0), np.arange(E) // (E // R)
    most = 0
    for rank in range(R):
        missing = counts[0].sum() - load[home == rank].sum()
        if missing > 0:
            largest = np.cumsum(np.sort(load[home != rank])[::-1])
            most = max(most, int(np.searchsorted(largest, missing)) + 1)
    return most


def unbalanced(counts: np.ndarray) -> dict[str, Any]:
    """The same routing without a plan, and with experts of a fixed capacity."""
    R, E = counts.shape
    load = counts.sum(0)
    per_rank = load.reshape(R, -1).sum(1)
    return {
        "plain_max_tokens_per_rank": int(per_rank.max()),
        "plain_imbalance": float(per_rank.max() / per_rank.mean()),
        "capacity_factor": CAPACITY,
        "capacity_dropped": float(np.maximum(load - CAPACITY * load.mean(), 0).sum() / load.sum()),
    }


def _text(x: dict[str, Any]) -> str:
    weights = f"{x['weights_mb_per_rank_mean']:.0f}", f"{x['weights_mb_per_rank_max']:.0f}"
    rows = [
        ("rows per rank, fewest and most", f"{x['min_tokens_per_rank']}", f"{x['max_tokens_per_rank']}"),
        ("without a plan: most, and over the mean", f"{x['plain_max_tokens_per_rank']}", f"{x['plain_imbalance']:.2f}"),
        (f"with capacity {CAPACITY}: dropped", f"{100 * x['capacity_dropped']:.2f} %", ""),
        ("borrowed experts: mean and most", f"{x['mean_redundant_experts']:.2f}", f"{x['max_redundant_experts']}"),
        ("their number at least, and allowed", f"{x['lower_bound_redundant']}", f"{x['experts'] // x['ranks']}"),
        ("turns in which their gradients go home", f"{x['gradient_turns']}", ""),
        ("MB of rows per rank, one way", f"{x['rows_mb_per_rank']:.0f}", ""),
        ("MB of borrowed weights: mean and most", *weights),
        ("planning, ms", f"{x['planning_ms']:.2f}", ""),
    ]  # fmt: skip
    title = f"{x['ranks']} ranks of {x['tokens']} tokens, {x['top_k']} of {x['experts']} experts, {x['routing']}"
    return f"{title}\n\n{report.columns(rows)}\n\n{NOTE}"


def draw(plan: "Plan", numbers: dict[str, Any], place: str) -> None:
    """Rows per rank without and with the plan, the borrowed experts' rows on top."""
    from matplotlib.figure import Figure

    R, E = plan.counts.shape
    plain = plan.counts.sum(0).reshape(R, -1).sum(1)
    sizes = np.asarray(plan.groups()[1]).reshape(R, 2, -1).sum(2)
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.step(np.arange(R + 1) - 0.5, np.append(plain, plain[-1]), where="post", color="0.5", label="without a plan")
    axes.bar(np.arange(R), sizes[:, 0], width=1, label="experts at home")
    axes.bar(np.arange(R), sizes[:, 1], width=1, bottom=sizes[:, 0], label="borrowed experts")
    axes.set(xlabel="rank", ylabel="rows", title=f"{numbers['routing']}, {R} ranks, {E} experts")
    axes.legend(fontsize="small")
    figure.savefig(place, dpi=150)
