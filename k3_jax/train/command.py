"""`k3 train`: the command line of a training run."""

import argparse
import sys
from pathlib import Path

from k3_jax.config import ConfigError

EXAMPLE = """example:
  k3 train --config configs/tiny.py --workdir runs/tiny
  k3 train --config configs/tiny.py --workdir runs/short --steps 100 --set optimizer.learning_rate=1e-3

The same command continues a run that was stopped, killed or preempted. WORKDIR holds checkpoints/STEP, metrics.jsonl,
tensorboard/ and loss.png."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a model from a recipe, or continue the run in --workdir."
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", required=True, metavar="FILE", help="a recipe: a Python file with get_config()")
    parser.add_argument("--workdir", required=True, type=Path, metavar="DIR", help="where everything is written")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps (train.steps)")
    parser.add_argument("--init", type=Path, metavar="DIR", help="start from the weights of this checkpoint")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="override a field")


def run(args: argparse.Namespace) -> int:
    from k3_jax.overrides import apply_overrides
    from k3_jax.recipe import load_recipe
    from k3_jax.train.loop import TrainingError, train

    if ":/" in str(args.workdir):
        raise ConfigError(
            f"--workdir {args.workdir}: expected a local or mounted folder; object stores are not supported yet"
        )
    overrides = args.set + ([f"train.steps={args.steps}"] if args.steps is not None else [])
    try:
        train(apply_overrides(load_recipe(args.config), overrides), args.workdir, args.init)
    except TrainingError as error:
        print(f"k3 train: {error}", file=sys.stderr)
        return 1
    return 0
