"""`k3 plan`: what a recipe amounts to, without allocating it. Imports no JAX until it runs."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from k3_jax.config import RunConfig
from k3_jax.overrides import apply_overrides
from k3_jax.recipe import load_recipe

if TYPE_CHECKING:
    from k3_jax.train.optimizer import OptimizerRow

WIDTH = 132  # of tables where there is no terminal
SECTIONS = ("parameters", "cache", "context", "optimizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "What a recipe amounts to, without allocating it: all of it, unless some parts are asked for."
    parser.add_argument("--config", required=True, metavar="FILE", help="a recipe, such as configs/k3.py")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides",
        help="change a field of the recipe, as --set model.moe.top_k=8; may be given several times",
    )  # fmt: skip
    parser.add_argument("--parameters", action="store_true", help="the number of parameters, by part")
    parser.add_argument("--cache", action="store_true", help="what a sequence keeps while it is decoded")
    parser.add_argument("--context", action="store_true", help="how KDA states travel where rows are cut over ranks")
    parser.add_argument("--optimizer", action="store_true", help="the optimizer's rule for every parameter")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Left to the command line, which knows what that means."""
        raise  # noqa: PLE0704  called while the error is handled


def run(args: argparse.Namespace) -> int:
    config = apply_overrides(load_recipe(args.config), args.overrides)
    sections = [name for name in SECTIONS if getattr(args, name)] or list(SECTIONS)
    report = make_report(config, sections)
    if args.json:
        print(json.dumps(report, default=dataclasses.asdict))
        return 0
    console = _Console()
    if not console.is_terminal:
        console = _Console(width=WIDTH)
    for name, value in report.items():
        console.print(_TABLES[name](config, value))
    return 0


def make_report(config: RunConfig, sections: Sequence[str]) -> dict[str, Any]:
    """The sections asked for, from one abstract model."""
    # Shapes need no device: a TPU that is training is left alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from k3_jax import audit

    model = audit.abstract_model(config.model)
    shapes = audit.parameter_shapes(model)
    make = {
        "parameters": lambda: audit.count_parameters(config.model, shapes),
        "cache": lambda: audit.cache_sizes(model),
        "context": lambda: audit.context_traffic(config.mesh, config.model),
        "optimizer": lambda: audit.optimizer_rows(config.optimizer, config.model, shapes),
    }
    return {name: make[name]() for name in sections}


# Tables


def _table(title: str, *columns: str, text_columns: int = 1) -> Table:
    """A table whose first columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text_columns else "right")
    return table


def _parameter_table(config: RunConfig, value: dict[str, Any]) -> Table:
    table = _table(f"{config.name}: parameters", "part", "parameters", "share")
    for part, count in value["by_part"].items():
        table.add_row(part, f"{count:,}", f"{100 * count / value['total']:.2f} %")
    table.add_section()
    table.add_row("total", f"{value['total']:,}", _magnitude(value["total"]))
    table.add_row("active per token", f"{value['active']:,}", _magnitude(value["active"]))
    return table


def _magnitude(count: int) -> str:
    unit, factor = next((u, f) for u, f in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("", 1)) if count >= f or f == 1)
    return f"{count / factor:.4g}{unit}"


def _cache_table(config: RunConfig, value: dict[str, Any]) -> Table:
    table = _table(f"{config.name}: what one sequence keeps (bf16)", "item", "value")
    table.add_row("values per token and MLA layer", f"{value['values_per_token_and_layer']:,}")
    table.add_row(f"cache per token, {value['mla_layers']} MLA layers", f"{value['bytes_per_token']:,} B")
    table.add_row("cache at 10^6 tokens", _size(value["bytes_at_1e6_tokens"]))
    table.add_row("the same if every layer were MLA", _size(value["all_mla_bytes_at_1e6_tokens"]))
    table.add_row("difference", f"{100 * value['relative_to_all_mla']:.1f} %")
    table.add_section()
    table.add_row(f"recurrent state, {value['kda_layers']} KDA layers", _size(value["recurrent_bytes_bf16"]))
    table.add_row("convolution state", _size(value["conv_bytes_bf16"]))
    table.add_row("both", _size(value["state_bytes_bf16"]))
    table.add_row("both, the recurrence in float32 (as kept here)", _size(value["state_bytes"]))
    return table


def _context_table(config: RunConfig, axes: list[dict[str, Any]]) -> Table:
    """One row, or none where rows are whole."""
    columns = ("axis", "prefix of KDA states", "ranks", "fragments of a row", "by all-gather", "by doubling")
    table = _table(f"{config.name}: received by a rank for one row and KDA layer", *columns, text_columns=2)
    for x in axes:
        sizes = _size(x["by_gather"]), _size(x["by_doubling"])
        table.add_row(x["axis"], x["chosen"], str(x["ranks"]), str(x["fragments"]), *sizes)
    return table


def _size(count: int) -> str:
    """Bytes in decimal units."""
    unit, factor = next((u, f) for u, f in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if count >= f or f == 1)
    return f"{count / factor:.2f} {unit}"


def _optimizer_table(config: RunConfig, rows: list["OptimizerRow"]) -> Table:
    columns = ("parameter", "optimizer", "rule", "shape", "tensors", "blocks", "block shape", "decay")
    table = _table(f"{config.name}: optimizer rules", *columns, text_columns=3)
    for row in rows:
        pieces = " + ".join("x".join(map(str, shape)) for shape in row.block_shapes)
        table.add_row(
            row.name, row.optimizer, row.kind, "x".join(map(str, row.shape)), str(row.count),
            f"{row.blocks:,}" if row.blocks else "-", pieces or "-", f"{row.weight_decay:g}",
        )  # fmt: skip
    return table


_TABLES = {
    "parameters": _parameter_table,
    "cache": _cache_table,
    "context": _context_table,
    "optimizer": _optimizer_table,
}
