"""`k3 bench kda`: Kimi Delta Attention, measured on this machine's TPU or CPU, or predicted for a TPU.

Imports no JAX until it runs.
"""

import argparse
import os
from typing import TYPE_CHECKING

from k3_jax.bench import report
from k3_jax.config import ConfigError

if TYPE_CHECKING:
    from pallas_kernels.kda.bench import Case

SMALL_SHAPE, LARGE_SHAPE = (1, 512, 2, 64), (1, 8192, 32, 128)
DTYPES = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape", type=report.integers, metavar="B,T,H,K[,V]",
        help=f"batch, tokens, heads, channels of keys and of values (default: {_text(SMALL_SHAPE)}; with --topology, "
        f"and on a TPU, {_text(LARGE_SHAPE)})",
    )  # fmt: skip
    parser.add_argument(
        "--segments", type=report.integers, default=(), metavar="LENGTHS",
        help="lengths of packed sequences that fill T, as 300,1,0,700,1047",
    )  # fmt: skip
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of q, k, v and beta (default: float32; with --topology, and on a TPU, bfloat16)",
    )
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="runs of each (default: 20)")
    parser.add_argument("--topology", metavar="NAME", help="predict for one device of a TPU, such as tpu7x:2x2x1")
    parser.add_argument(
        "--implementation", choices=("pallas", "xla"), default="pallas", help="with --topology (default: pallas)"
    )
    parser.add_argument(
        "--raw-gate",
        action="store_true",
        help="with --topology: from the gate's logits, in --dtype, as a layer has them",
    )
    parser.add_argument(
        "--baseline",
        choices=("dplr",),
        help="measure also the general diagonal-plus-low-rank form, in the same chunks (without --topology)",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="with --topology: public kernels beside ours, those of tokamax and vllm-torchtpu-core that are installed",
    )
    parser.add_argument("--plot", metavar="FILE", help="with --topology: a picture of the bundles (.png, .pdf, .svg)")
    report.add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise ConfigError(f"--repeats = {args.repeats}: expected a positive integer")
    if args.raw_gate and not args.topology:
        raise ConfigError("--raw-gate: expected --topology; what is measured here has its gate activated outside")
    for option in ("peers", "plot"):
        if getattr(args, option) and not args.topology:
            raise ConfigError(f"--{option}: expected --topology")
    report.check_picture(args.plot)
    if args.baseline and (args.topology or args.segments):
        raise ConfigError("--baseline: expected neither --topology nor --segments; it is measured, on whole rows")
    report.check_json_argument(args.json)
    if args.topology:
        os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU here is not needed
    import jax

    on_tpu = not args.topology and jax.default_backend() == "tpu"
    if args.peers:
        _check_peers()
    case = _case(args, large=bool(args.topology) or on_tpu)
    from k3_jax.bench import kda_device, kda_measured, kda_predicted
    from pallas_kernels.kda.api import LARGEST_HEAD

    if args.peers and (case.segments or case.dtype != "bfloat16"):
        raise ConfigError(
            "--peers: expected neither --segments nor float32; they are compiled for whole rows in bfloat16"
        )
    if args.topology:
        return kda_predicted.run(case, args.topology, args.implementation, args.peers, args.plot, args.json)
    if on_tpu and max(case.K, case.V) > LARGEST_HEAD:
        raise ConfigError(f"--shape = {_text(args.shape)}: expected K, V <= {LARGEST_HEAD} for the kernels")
    if on_tpu and args.baseline:
        raise ConfigError(
            "--baseline: expected a CPU; it is not written for a TPU (JAX_PLATFORMS=cpu measures the CPU)"
        )
    if on_tpu:
        return kda_device.run(case, args.repeats, args.json)
    return kda_measured.run(case, args.repeats, args.baseline, args.json)


def _check_peers() -> None:
    from k3_jax.bench.kda_tpu_peers import PEERS, installed

    if not installed():
        raise ConfigError(f"--peers: expected one of {', '.join(p.package for p in PEERS.values())} to be installed")


def _text(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _case(args: argparse.Namespace, large: bool) -> "Case":
    """What is benchmarked, of the arguments."""
    from pallas_kernels.kda.bench import Case

    shape = args.shape or (LARGE_SHAPE if large else SMALL_SHAPE)
    if args.segments and not args.shape:
        shape = (1, sum(args.segments), *shape[2:])
    if len(shape) not in (4, 5):
        raise ConfigError(f"--shape = {_text(shape)}: expected B,T,H,K or B,T,H,K,V")
    values = shape[4] if len(shape) == 5 else shape[3]
    dtype = args.dtype or ("bfloat16" if large else "float32")
    try:
        return Case(*shape[:4], values, dtype, args.segments, args.raw_gate)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
