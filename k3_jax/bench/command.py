"""`k3 bench`: one benchmark per subcommand, each a module with `add_arguments(parser)` and `run(args) -> int`."""

import argparse
import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Bench:
    module: str
    help: str
    example: str


BENCHES = {
    "kda": Bench(
        "k3_jax.bench.kda",
        "Kimi Delta Attention: measured on this machine's TPU or CPU, or predicted for a TPU",
        "k3 bench kda --shape 1,512,2,64 --json -\n  k3 bench kda --topology tpu7x:2x2x1 --json kda.json",
    ),
    "attention": Bench(
        "k3_jax.bench.attention",
        "attention of Gated MLA and JAX's Splash kernel, predicted for a TPU",
        "k3 bench attention --topology tpu7x:2x2x1 --json attention.json",
    ),
    "grouped": Bench(
        "k3_jax.bench.grouped",
        "grouped products of the experts, predicted for a TPU, beside the kernels of XLA and of JAX",
        "k3 bench grouped --topology tpu7x:2x2x1 --ranks 64 --json grouped.json",
    ),
    "decode": Bench(
        "k3_jax.bench.decode",
        "the decode step as one kernel, predicted for a TPU slice; without a topology XLA's, measured on this machine",
        "k3 bench decode --topology tpu7x:2x2x4 --config configs/k3.py --batch 1 --json\n  k3 bench decode",
    ),
    "balance": Bench(
        "k3_jax.bench.balance",
        "expert parallelism: who computes what, and which experts are borrowed, for a given routing",
        "k3 bench balance --ranks 64 --routing zipf --plot balance.png --json",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, entry in BENCHES.items():
        subparser = benches.add_parser(
            name,
            help=entry.help,
            description=f"{entry.help}.",
            epilog=f"examples:\n  {entry.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module = importlib.import_module(entry.module)
        module.add_arguments(subparser)
        subparser.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> int:
    return args.run_bench(args)
