"""Checkpoints on disk: WORKDIR/checkpoints/STEP/{model, optimizer, run}, written by Orbax.

`model` and `optimizer` map canonical names to arrays, whatever the mesh or the grouping of layers was; `run` is JSON
with the configuration and the counters. Reading is strict: Orbax would cast a wrong dtype silently.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
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
    """The JSON of a step: `config` (the whole RunConfig) and the trainer's counters."""
    path = step / RUN / "metadata"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {step}: {path.name} cannot be read ({error})") from error


def read_arrays(path: Path, targets: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of one item, each on the sharding of its target.

    Raises ConfigError unless names, shapes and dtypes are exactly those of `targets`.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            found = checkpointer.metadata(path.absolute()).item_metadata.tree
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"checkpoint {path}: not a finished Orbax checkpoint ({error})") from error
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
        except (OSError, ValueError) as error:
            raise ConfigError(f"checkpoint {path}: damaged ({error})") from error


def saved_dtypes(path: Path) -> dict[str, Any]:
    """The dtype of every array of one item."""
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.metadata(path.absolute()).item_metadata.tree
    return {name: metadata.dtype for name, metadata in found.items()}
