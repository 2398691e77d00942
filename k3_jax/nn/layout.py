"""Names of parameters. In memory, layers of one kind are stacked for the scan; everywhere else (checkpoints, optimizer
rules, the released files, `k3 plan`) a tensor has its canonical name, `layers.{index}.{kind}.{tensor}`, whatever the
grouping.

Trees here are a model, or anything that holds model-shaped trees (gradients, optimizer states).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from k3_jax import sharding
from k3_jax.nn.grouping import Depth

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
    """(what leads to the model-shaped tree, (group, run) if the leaf is stacked, the tensor's name there)."""
    parts = _parts(path)
    if "groups" not in parts:
        return "", None, ".".join(parts)
    at = parts.index("groups")
    place = int(parts[at + 1]), int(parts[at + 2])
    return "".join(f"{part}." for part in parts[:at]), place, ".".join(parts[at + 3 :])


def leaf_names(tree: Tree) -> Tree:
    """The same tree with each leaf's name; layers' leaves without their index, as `kda.q`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _split(path)[2], tree)


def to_layers(tree: Tree, depth: Depth) -> dict[str, jax.Array]:
    """One array per canonical name, on all ranks of the pipeline."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        prefix, place, name = _split(path)
        if place is None:
            named[prefix + name] = leaf
            continue
        numbers = _numbers(depth, place)
        leaf = sharding.place(leaf, PartitionSpec(None, *jax.typeof(leaf).sharding.spec[1:]))
        for i in np.argwhere(numbers >= 0):
            named[f"{prefix}layers.{numbers[*i]}.{name}"] = leaf[*i]
    return named


def from_layers(named: Mapping[str, jax.Array], like: Tree, depth: Depth) -> Tree:
    """The inverse, for a tree of the structure of `like`; a place without a layer holds zeros. Raises KeyError for a
    missing name."""

    def gather(path, leaf):
        prefix, place, name = _split(path)
        if place is None:
            return _laid_out(named[prefix + name], leaf)
        numbers = _numbers(depth, place)
        present = named[f"{prefix}layers.{numbers.max()}.{name}"]
        rows = [
            named[f"{prefix}layers.{layer}.{name}"] if layer >= 0 else jnp.zeros_like(present)
            for layer in numbers.reshape(-1)
        ]
        stack = jnp.stack(rows).reshape(*numbers.shape, *present.shape)
        return _laid_out(stack, leaf)

    return jax.tree_util.tree_map_with_path(gather, like)


def abstract_layers(tree: Tree, depth: Depth) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of every canonical name, for a tree of arrays or of ShapeDtypeStructs."""
    return jax.eval_shape(lambda tree: to_layers(tree, depth), tree)


def _laid_out(x: jax.Array, like) -> jax.Array:
    return sharding.place(x, sharding.spec_of(like)) if sharding.has_mesh() else x


def _numbers(depth: Depth, place: tuple[int, int]) -> np.ndarray:
    return depth.numbers[place[0]][place[1]]
