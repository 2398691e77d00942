"""Names of parameters. In memory, layers of one kind are stacked for the scan; everywhere else (checkpoints, optimizer
rules, the released files, `k3 plan`) a tensor has its canonical name, `layers.{index}.{kind}.{tensor}`, whatever the
grouping.

Trees here are a model, or anything that holds model-shaped trees (gradients, optimizer states).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from k3_jax.config import K3Config
from k3_jax.nn.depth import plan_stages

Tree = Any


def _parts(path) -> list[str]:
    """Attribute names, keys and indices along a tree path; an nnx.Param's own `value` step is left out."""
    parts = []
    for key in path:
        match key:
            case GetAttrKey(name):
                parts.append(name)
            case DictKey(name):
                parts.append(str(name))
            case SequenceKey(index):
                parts.append(str(index))
            case _:
                parts.append(str(key))
    return parts[:-1] if parts[-1] == "value" else parts


def _split(path) -> tuple[str, tuple[int, int] | None, str]:
    """(what leads to the model-shaped tree, (stage, run) if the leaf is stacked, the tensor's name there)."""
    parts = _parts(path)
    if "stages" not in parts:
        return "", None, ".".join(parts)
    at = parts.index("stages")
    place = int(parts[at + 1]), int(parts[at + 2])
    return "".join(f"{part}." for part in parts[:at]), place, ".".join(parts[at + 3 :])


def leaf_names(tree: Tree) -> Tree:
    """The same tree with each leaf's name; layers' leaves without their index, as `kda.q`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _split(path)[2], tree)


def to_layers(tree: Tree, config: K3Config) -> dict[str, jax.Array]:
    """One array per canonical name."""
    stages, named = plan_stages(config), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        prefix, place, name = _split(path)
        if place is None:
            named[prefix + name] = leaf
            continue
        numbers = stages[place[0]].layers(place[1])
        for (i, j), layer in _grid(numbers):
            named[f"{prefix}layers.{layer}.{name}"] = leaf[i, j]
    return named


def from_layers(named: Mapping[str, jax.Array], like: Tree, config: K3Config) -> Tree:
    """The inverse, for a tree of the structure of `like`. Raises KeyError for a missing name."""
    stages = plan_stages(config)

    def gather(path, leaf):
        prefix, place, name = _split(path)
        if place is None:
            return named[prefix + name]
        numbers = stages[place[0]].layers(place[1])
        rows = [named[f"{prefix}layers.{layer}.{name}"] for _, layer in _grid(numbers)]
        return jnp.stack(rows).reshape(*numbers.shape, *rows[0].shape)

    return jax.tree_util.tree_map_with_path(gather, like)


def abstract_layers(tree: Tree, config: K3Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of every canonical name, for a tree of arrays or of ShapeDtypeStructs."""
    return jax.eval_shape(lambda tree: to_layers(tree, config), tree)


def _grid(numbers):
    return [((i, j), int(numbers[i, j])) for i in range(numbers.shape[0]) for j in range(numbers.shape[1])]
