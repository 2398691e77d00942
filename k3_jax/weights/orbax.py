"""Checkpoints on disk: WORKDIR/checkpoints/STEP/{model, optimizer, run}, written by Orbax.

`model` and `optimizer` map canonical names to arrays, whatever the mesh or the grouping of layers was; `run` is JSON
with the configuration and the counters. Reading is strict: Orbax would cast a wrong dtype silently.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from k3_jax.config import ConfigError

MODEL, OPTIMIZER, RUN = "model", "optimizer", "run"


def find_step(directory: str | Path) -> Path | None:
    """The folder of one step: `directory` itself, or the newest finished step in it or in its `checkpoints`."""
    directory = Path(directory)
    if (directory / MODEL).is_dir():
        return directory
    for folder in (directory / "checkpoints", directory):
        steps = [path for path in folder.glob("*") if path.name.isdigit() and (path / MODEL).is_dir()]
        if steps:
            return max(steps, key=lambda path: int(path.name))
    return None


def read_run(step: Path) -> dict[str, Any]:
    """The JSON of a step: `config` (the whole RunConfig), `data` (the position) and the trainer's counters."""
    path = step / RUN / "metadata"
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise damaged(step, error) from error
    if not isinstance(run, dict) or "config" not in run:
        raise damaged(step, f"{path.name} holds no configuration")
    return run


def damaged(path: Path, why: object) -> ConfigError:
    """One line, whatever the library printed, with the way out."""
    step = path if path.name.isdigit() else path.parent
    first = str(why).split("\n", 1)[0][:200]
    return ConfigError(
        f"checkpoint {path}: damaged or unfinished ({first}); remove {step} to go back to the one before"
    )


def _found(checkpointer: ocp.StandardCheckpointer, path: Path) -> dict[str, Any]:
    """Name -> metadata of the arrays of one item."""
    try:
        return checkpointer.metadata(path.absolute()).item_metadata.tree
    except Exception as error:  # the library raises whatever the damage makes it trip over
        raise damaged(path, error) from error


def read_arrays(path: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of one item, each on the sharding of its target.

    Raises ConfigError unless names, shapes and dtypes are exactly those of `targets`.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        found = _found(checkpointer, path)
        missing, extra = sorted(set(targets) - set(found)), sorted(set(found) - set(targets))
        if missing or extra:
            raise ConfigError(f"checkpoint {path}: missing {missing[:3]}, unexpected {extra[:3]}")
        for name, target in targets.items():
            saved = (tuple(found[name].shape), str(found[name].dtype))
            wanted = (tuple(target.shape), str(target.dtype))
            if saved != wanted:
                raise ConfigError(f"checkpoint {path}: {name} is {saved}, expected {wanted}")
        try:
            return checkpointer.restore(path.absolute(), dict(targets))
        except Exception as error:
            raise damaged(path, error) from error


def saved_dtypes(path: Path) -> dict[str, Any]:
    """The dtype of every array of one item."""
    with ocp.StandardCheckpointer() as checkpointer:
        return {name: metadata.dtype for name, metadata in _found(checkpointer, path).items()}


def read_array(path: Path, name: str) -> np.ndarray:
    """One array of an item, in the host's memory."""
    arguments = ocp.args.PyTreeRestore(
        item={name: 0}, restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)}, partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path.absolute(), args=arguments)[name]
    except Exception as error:  # as in `_found`
        raise damaged(path, error) from error
