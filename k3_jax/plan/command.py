"""`k3 plan`: what a recipe amounts to, without allocating it. Imports no JAX until it runs."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from k3_jax.config import ConfigError, RunConfig
from k3_jax.overrides import apply_overrides
from k3_jax.plan.tables import TABLES
from k3_jax.recipe import load_recipe

WIDTH = 132  # of tables where there is no terminal
SECTIONS = ("parameters", "cache", "context", "optimizer")
EFFORTS = ("O0", "O1", "O2", "O3")
PUBLISHED = ("kimi-k2",)
OF_A_RECIPE = ("overrides", *SECTIONS, "pipeline", "picture", "topology", "lower", "compile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What a recipe amounts to, without allocating it: the model, or with --topology its training on that TPU pod "
        "(bytes per device, what travels, how fast it could be at best)."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", metavar="FILE", help="a recipe, such as configs/k3.py")
    source.add_argument(
        "--published", choices=PUBLISHED,
        help="instead: a run that others have measured, planned with the same formulas, and how far they were from it",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides",
        help="change a field of the recipe, as --set model.moe.top_k=8; may be given several times",
    )  # fmt: skip
    parser.add_argument("--parameters", action="store_true", help="the number of parameters, by part")
    parser.add_argument("--cache", action="store_true", help="what a sequence keeps while it is decoded")
    parser.add_argument("--context", action="store_true", help="how KDA states travel where rows are cut over ranks")
    parser.add_argument("--optimizer", action="store_true", help="the optimizer's rule for every parameter")
    parser.add_argument("--pipeline", action="store_true", help="the timetable of a pipeline, as --set mesh.pipe=8")
    parser.add_argument("--picture", metavar="FILE", help="with --pipeline: draw the timetable, as a .png or .svg")
    parser.add_argument("--topology", metavar="NAME", help="plan the training step on these chips, as tpu7x:8x8x8")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--lower", action="store_true", help="also trace and lower the real step (a minute)")
    depth.add_argument("--compile", action="store_true", help="also compile it with libtpu (half an hour), and compare")
    parser.add_argument(
        "--effort", choices=EFFORTS, default="O1", help="XLA's optimization level for --compile (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Left to the command line, which knows what that means."""
        raise  # noqa: PLE0704  called while the error is handled


def run(args: argparse.Namespace) -> int:
    if args.published:
        return _run_published(args)
    if (args.lower or args.compile) and not args.topology:
        raise ConfigError("--topology is missing: expected the chips to lower or compile for, such as tpu7x:8x8x8")
    if args.picture and not args.pipeline:
        raise ConfigError("--picture: expected together with --pipeline")
    config = apply_overrides(load_recipe(args.config), args.overrides)
    sections = [name for name in SECTIONS if getattr(args, name)]
    # Shapes need no device: a TPU that is training is left alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    report = make_report(config, sections or ([] if args.topology or args.pipeline else list(SECTIONS)))
    if args.pipeline:
        from k3_jax.plan import pipeline

        report["pipeline"] = pipeline.report(config)
        if args.picture:
            pipeline.draw(config, args.picture)
    tables = [TABLES[name](config, value) for name, value in report.items()]
    if args.topology:
        from k3_jax.plan import training

        plan = training.plan_training(config, args.topology, args.lower, args.effort if args.compile else None)
        report |= training.as_json(plan)
        tables += training.tables(plan)
    _publish(report, tables, args.json)
    return 0


def _run_published(args: argparse.Namespace) -> int:
    given = next((name for name in OF_A_RECIPE if getattr(args, name)), None)
    if given:
        flag = "set" if given == "overrides" else given
        raise ConfigError(f"--published {args.published}: expected no --{flag}, which is for a recipe (--config)")
    os.environ["JAX_PLATFORMS"] = "cpu"
    from k3_jax.plan import published

    plan = published.plan_published(published.RUNS[args.published])
    _publish(published.as_json(plan), published.tables(plan), args.json)
    return 0


def _publish(report: dict[str, Any], tables: Sequence[Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, default=dataclasses.asdict))
        return
    console = _Console()
    if not console.is_terminal:
        console = _Console(width=WIDTH)
    for table in tables:
        console.print(table)


def make_report(config: RunConfig, sections: Sequence[str]) -> dict[str, Any]:
    """The sections asked for, from one abstract model."""
    from k3_jax import audit

    if not sections:
        return {}
    model = audit.abstract_model(config.model)
    shapes = audit.parameter_shapes(model)
    make = {
        "parameters": lambda: audit.count_parameters(config.model, shapes),
        "cache": lambda: audit.cache_sizes(model),
        "context": lambda: audit.context_traffic(config.mesh, config.model),
        "optimizer": lambda: audit.optimizer_rows(config.optimizer, config.model, shapes),
    }
    return {name: make[name]() for name in sections}
