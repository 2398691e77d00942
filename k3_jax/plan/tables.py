"""Tables of the audit: parameters by part, cache and state of a sequence, optimizer rules."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from k3_jax.config import RunConfig

if TYPE_CHECKING:
    from k3_jax.train.optimizer import OptimizerRow


def new_table(title: str, *columns: str, text_columns: int = 1) -> Table:
    """A table whose first columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text_columns else "right")
    return table


def _parameter_table(config: RunConfig, value: dict[str, Any]) -> Table:
    table = new_table(f"{config.name}: parameters", "part", "parameters", "share")
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
    table = new_table(f"{config.name}: what one sequence keeps (bf16)", "item", "value")
    table.add_row("values per token and MLA layer", f"{value['values_per_token_and_layer']:,}")
    table.add_row(f"cache per token, {value['mla_layers']} MLA layers", f"{value['bytes_per_token']:,} B")
    table.add_row("cache at 10^6 tokens", size(value["bytes_at_1e6_tokens"]))
    table.add_row("the same if every layer were MLA", size(value["all_mla_bytes_at_1e6_tokens"]))
    table.add_row("difference", f"{100 * value['relative_to_all_mla']:.1f} %")
    table.add_section()
    table.add_row(f"recurrent state, {value['kda_layers']} KDA layers", size(value["recurrent_bytes_bf16"]))
    table.add_row("convolution state", size(value["conv_bytes_bf16"]))
    table.add_row("both", size(value["state_bytes_bf16"]))
    table.add_row("both, the recurrence in float32 (as kept here)", size(value["state_bytes"]))
    return table


def _context_table(config: RunConfig, axes: list[dict[str, Any]]) -> Table:
    """One row, or none where rows are whole."""
    columns = ("axis", "prefix of KDA states", "ranks", "fragments of a row", "by all-gather", "by doubling")
    table = new_table(f"{config.name}: received by a rank for one row and KDA layer", *columns, text_columns=2)
    for x in axes:
        sizes = size(x["by_gather"]), size(x["by_doubling"])
        table.add_row(x["axis"], x["chosen"], str(x["ranks"]), str(x["fragments"]), *sizes)
    return table


def _pipeline_table(config: RunConfig, value: dict[str, Any]) -> Table:
    mesh = config.mesh
    title = f"{config.name}: a pipeline of {mesh.pipe} ranks with {mesh.interleave} chunks each"
    table = new_table(title, "item", "value")
    table.add_row("micro-batches, ticks", f"{value['micro_batches']}, {value['ticks']}")
    table.add_row("a rank rests, stages of equal cost", f"{100 * value['bubble']:.1f} %")
    table.add_row("chunks in flight on each rank", " ".join(map(str, value["in_flight"])))
    table.add_row("AttnRes rows kept by the fullest rank", str(value["rows_kept"]))
    table.add_row("their cotangents", str(value["cotangents_kept"]))
    table.add_row("rows of the longest message", str(value["rows_sent"]))
    table.add_row("layers of each chunk", " ".join(map(str, value["layers"])))
    most = max(value["cost"])
    table.add_row("their cost, of the most expensive", " ".join(f"{cost / most:.2f}" for cost in value["cost"]))
    return table


def size(count: int) -> str:
    """Bytes in decimal units."""
    unit, factor = next((u, f) for u, f in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if count >= f or f == 1)
    return f"{count / factor:.2f} {unit}"


def _optimizer_table(config: RunConfig, rows: list["OptimizerRow"]) -> Table:
    columns = ("parameter", "optimizer", "rule", "shape", "tensors", "blocks", "block shape", "decay")
    table = new_table(f"{config.name}: optimizer rules", *columns, text_columns=3)
    for row in rows:
        pieces = " + ".join("x".join(map(str, shape)) for shape in row.block_shapes)
        table.add_row(
            row.name, row.optimizer, row.kind, "x".join(map(str, row.shape)), str(row.count),
            f"{row.blocks:,}" if row.blocks else "-", pieces or "-", f"{row.weight_decay:g}",
        )  # fmt: skip
    return table


TABLES = {
    "parameters": _parameter_table,
    "cache": _cache_table,
    "context": _context_table,
    "optimizer": _optimizer_table,
    "pipeline": _pipeline_table,
}
