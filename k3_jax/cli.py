"""The `k3` command. Each subcommand is a module with `add_arguments(parser)` and `run(args) -> int`; here is what they
share: the table, the environment of JAX, and what becomes of an error.

JAX is imported by `run` only, after the environment is set, so that help and bad arguments take no time.
"""

import argparse
import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from k3_jax.config import ConfigError

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # the last two as a shell reports the signals


@dataclass(frozen=True)
class Command:
    module: str
    help: str
    example: str


COMMANDS = {
    "train": Command(
        "k3_jax.train.command",
        "train a model, or go on with a run",
        "k3 train --config configs/tiny.py --workdir runs/tiny --set optimizer.learning_rate=1e-3",
    ),
    "generate": Command(
        "k3_jax.serve.generate_command",
        "continue a text",
        'k3 generate --checkpoint runs/tiny --prompt "def " --max-tokens 200 --temperature 0.8 --seed 0',
    ),
    "score": Command(
        "k3_jax.serve.score_command",
        "write the logits of given tokens",
        "k3 score --checkpoint runs/tiny --tokens tokens.npy --out logits.npy --dtype float32",
    ),
    "pack": Command(
        "k3_jax.serve.pack_command",
        "cut a checkpoint into the tapes of the decode megakernel",
        "k3 pack --checkpoint kimi-k3 --out kimi-k3-32 --ranks 32",
    ),
    "plan": Command(
        "k3_jax.plan.command",
        "parameters, optimizer rules and cache of a configuration, or its training on a TPU pod, without allocating it",
        "k3 plan --config configs/k3.py --parameters --json\n  "
        "k3 plan --config configs/k3_pretrain_tpu7x_512.py --topology tpu7x:8x8x8\n  "
        "k3 plan --published kimi-k2",
    ),
    "bench": Command(
        "k3_jax.bench.command",
        "measure on a CPU, predict for a TPU",
        "k3 bench kda --shape 1,512,2,64",
    ),
}


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser of all subcommands, with the arguments of one of them: only its module is imported."""
    parser = _Parser(
        prog="k3",
        description="Kimi K3 in JAX/Flax: train, generate and score.",
        epilog=f"example: {COMMANDS['generate'].example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"k3-jax {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, entry in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=entry.help,
            description=f"{entry.help[0].upper()}{entry.help[1:]}.",
            epilog=f"example:\n  {entry.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == command:
            module = importlib.import_module(entry.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run, refuse=subparser.error)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit status: 2 for a mistake of the user, told in one line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = next((word for word in argv if not word.startswith("-")), None)
    try:
        args, unknown = make_parser(command).parse_known_args(argv)
        if unknown:
            args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
        _set_environment()
        status = args.run(args)
        sys.stdout.flush()
        return status
    except ConfigError as error:
        print(f"k3 {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads our output has enough. Python would try to write the rest when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        print(f"k3 {command}: {error.strerror}", file=sys.stderr)
        return 1


def _set_environment() -> None:
    """Defaults that JAX reads when it is imported: keep what took over a second to compile, log no warnings of XLA."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3_jax" / "xla"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        # A CPU program of several devices loses the order of its collectives there, and hangs (jaxlib 0.12.0.1).
        os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Orbax warns of its own optional files, and its threads print what the command reports in one line.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _version() -> str:
    try:
        return version("k3-jax")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
