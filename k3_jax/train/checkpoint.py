"""Saving and restoring a TrainState with Orbax: asynchronous, atomic, the newest `keep` steps.

Arrays have canonical names on disk, so a checkpoint does not depend on the mesh or on the grouping of layers.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, get_mesh

from k3_jax.nn.grouping import Depth
from k3_jax.nn.layout import abstract_layers, from_layers, to_layers
from k3_jax.sharding import spec_of
from k3_jax.train.state import TrainState
from k3_jax.weights.orbax import MODEL, OPTIMIZER, RUN, read_arrays, read_run

COUNTERS = ("step", "updates", "bad_in_row")


class Checkpoints:
    """The checkpoints of one working directory. Use as a context manager: leaving it waits for the last save."""

    def __init__(self, workdir: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True, create=True)
        self.directory = workdir.absolute() / "checkpoints"
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self.remove_unfinished()
        self._by_layer = jax.jit(to_layers, static_argnums=1)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState, run: dict[str, Any]) -> None:
        """Start writing; the device arrays are copied before this returns. Raises OSError if the one before failed."""
        counters = {name: int(getattr(state, name)) for name in COUNTERS}
        args = ocp.args.Composite(
            **{
                MODEL: ocp.args.StandardSave(self._by_layer(state.model, state.model.depth)),
                OPTIMIZER: ocp.args.StandardSave(self._by_layer(state.optimizer, state.model.depth)),
                RUN: ocp.args.JsonSave(run | counters),
            }
        )
        self._manager.save(counters["step"], args=args, force=True)

    def wait(self) -> None:
        """Until the last save is on disk. Raises OSError if it failed."""
        self._manager.wait_until_finished()

    def remove_unfinished(self) -> None:
        """Delete what a failed or killed save left: it may be what fills the disk."""
        for path in self.directory.glob("*.orbax-checkpoint-tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def restore(self, like: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
        """The state of `step`, laid out like `like` (which may be abstract), and the run's JSON.

        Raises ConfigError for missing or unexpected names, other shapes or other dtypes.
        """
        folder = self.directory / str(step)
        model = restore_tree(folder / MODEL, like.model, like.model.depth)
        optimizer = restore_tree(folder / OPTIMIZER, like.optimizer, like.model.depth)
        run = read_run(folder)
        counters = {name: jnp.asarray(run[name], jnp.int32) for name in COUNTERS}
        return TrainState(model=model, optimizer=optimizer, **counters), run


def restore_tree(path: Path, like: Any, depth: Depth) -> Any:
    """One item of a checkpoint as a tree of the structure, dtypes and sharding of `like`."""
    mesh = get_mesh()
    targets = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(x)))
        for name, x in abstract_layers(like, depth).items()
    }
    named = read_arrays(path, targets)
    return jax.jit(lambda named: from_layers(named, like, depth))(named)
