"""The timetable of a recipe's pipeline: how long ranks rest, what is in flight, and a picture of it."""

from typing import Any

import numpy as np

from k3_jax.config import ConfigError, RunConfig
from k3_jax.nn.grouping import Depth, layer_cost
from k3_jax.parallel.schedule import IDLE, Passes, Schedule
from k3_jax.train.pipeline import schedule_of


def schedule(run: RunConfig) -> tuple[Depth, Schedule]:
    """Raises ConfigError where layers do not lie over ranks, or more chunks are asked for than there are blocks."""
    if run.mesh.pipe < 2:
        raise ConfigError(f"mesh.pipe = {run.mesh.pipe}: expected a number of ranks above 1, as --set mesh.pipe=8")
    depth = Depth(run.model, run.mesh.pipe, run.mesh.interleave)
    return depth, schedule_of(depth, run.train.grad_accumulation)


def report(run: RunConfig) -> dict[str, Any]:
    """`bubble`: share of its time that a rank rests, stages of equal cost. `in_flight`: chunks between their forward
    and their backward pass, the most of each rank. Rows are of the AttnRes bank, one micro-batch's [B, T, D]."""
    depth, table = schedule(run)
    return {
        "micro_batches": table.micro_batches,
        "ticks": table.ticks,
        "bubble": table.bubble(),
        "in_flight": table.in_flight().max(0).tolist(),
        "rows_kept": table.pool,
        "cotangents_kept": table.returns,
        "rows_sent": table.message,
        "layers": [len(chunk) for chunk in depth.chunks],
        "cost": [sum(layer_cost(run.model, layer) for layer in chunk) for chunk in depth.chunks],
    }


def draw(run: RunConfig, path: str) -> None:
    """Forward passes above, backward passes below, one row per rank, a colour per micro-batch, the chunk written in;
    what is in flight under them. Raises ConfigError if the file cannot be written."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    _, table = schedule(run)
    figure, (passes, flight) = pyplot.subplots(
        2, 1, sharex=True, figsize=(min(24, 4 + 0.25 * table.ticks), 3 + 0.5 * table.pipe), height_ratios=(3, 1)
    )
    for offset, found in ((0.0, table.forward), (0.5, table.backward)):
        _boxes(passes, found, offset)
    passes.set(ylabel="rank", ylim=(table.pipe, 0), yticks=np.arange(table.pipe) + 0.5, yticklabels=range(table.pipe))
    passes.set_title(
        f"{run.name}: {table.pipe} ranks x {table.interleave} chunks, {table.micro_batches} micro-batches; "
        f"upper halves forward, lower halves backward; at rest {100 * table.bubble():.1f} % of the time"
    )
    for rank, counts in enumerate(table.in_flight().T):
        flight.step(np.arange(table.ticks), counts, where="post", label=f"rank {rank}")
    flight.set(xlabel="tick", ylabel="chunks in flight", xlim=(0, table.ticks))
    flight.legend(ncols=4, fontsize="x-small")
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: cannot be written ({error})") from error
    finally:
        pyplot.close(figure)


def _boxes(axes, passes: Passes, offset: float) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab20"]
    for tick, rank in np.argwhere(passes.micro_batch != IDLE):
        colour = colours(passes.micro_batch[tick, rank] % 20)
        axes.broken_barh([(tick, 1)], (rank + offset, 0.45), facecolor=colour, edgecolor="white", linewidth=0.4)
        axes.text(tick + 0.5, rank + offset + 0.25, passes.chunk[tick, rank], ha="center", va="center", fontsize=5)
