"""`k3 bench decode`: the decode megakernel compiled for a TPU that is not there, and its time predicted beside that of
the published kernel under one model; without --topology, tokens per second of the XLA decode path on this machine.

Imports no JAX until it runs.
"""

import argparse
import os
import sys

from k3_jax.bench import report
from k3_jax.config import ConfigError

RELEASED, TINY, CONTEXT, STEPS, REPEATS = "configs/k3.py", "configs/tiny.py", 1152, 16, 5
LARGEST_BATCH = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--topology", metavar="NAME", help="predict for all devices of it, such as tpu7x:2x2x4")
    parser.add_argument("--config", metavar="FILE", help=f"recipe (default: {TINY}; with --topology {RELEASED})")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows, 1 to 8 (default: 1)")
    parser.add_argument(
        "--context",
        type=int,
        default=CONTEXT,
        metavar="T",
        help=f"tokens in the cache of every row (default: {CONTEXT})",
    )
    parser.add_argument(
        "--baseline", choices=("mla",), help="with --topology: beside it the model with MLA in all layers but the first"
    )
    parser.add_argument("--plot", metavar="FILE", help="with --topology: where the time goes (.png, .pdf, .svg)")
    report.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.batch <= LARGEST_BATCH:
        raise ConfigError(f"--batch = {args.batch}: expected 1 to {LARGEST_BATCH}")
    if args.context < 1:
        raise ConfigError(f"--context = {args.context}: expected a positive number of tokens")
    for option in ("baseline", "plot"):
        if getattr(args, option) and not args.topology:
            raise ConfigError(f"--{option}: expected --topology")
    report.check_picture(args.plot)
    report.check_json_argument(args.json)
    if not args.topology:
        return _measure(args)
    os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU here is not needed
    from k3_jax.bench import decode_predicted
    from pallas_kernels.common.dump import DumpError

    try:
        return decode_predicted.run(args)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    except DumpError as error:
        print(f"k3 bench decode: {error}", file=sys.stderr)
        return 1


def _measure(args: argparse.Namespace) -> int:
    from k3_jax.bench import decode_measured

    numbers = decode_measured.measure(args.config or TINY, args.batch, args.context, STEPS, REPEATS)
    rows = [("", "tokens/s", "ms per step", "to compile, s")]
    cells = (f"{numbers[name]:.2f}" for name in ("tokens_per_s", "median_step_ms", "compile_s"))
    rows.append((f"batch {args.batch}, context {args.context}", *cells))
    text = f"{args.config or TINY}: the XLA decode path, measured on {numbers['device']}\n\n{report.columns(rows)}"
    report.publish(args.json, numbers, text)
    return 0
