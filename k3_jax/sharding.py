"""One table: logical letter -> mesh axes. Everything that is sharded is sharded by a string of these letters.

Weights are stored by `STORED` and gathered where they are used (`use`); activations follow `ACTIVE`.
`local` runs a function on each device's own shard. Without a mesh (`jax.set_mesh`) all of them do nothing, so that
a layer works alone on one device. Letters that are in no table (K, V, L, ...) are never sharded.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, get_abstract_mesh, reshard
from jax.typing import DTypeLike

from k3_jax.config import ConfigError

Axes = tuple[str, ...]

# Letters of a stored weight.          D: model width, O: vocabulary, H: heads, F: inner width, E: experts
# D is of all that is not an expert: 57B of K3's parameters, and their optimizer state.
STORED: dict[str, Axes] = {
    "D": ("fsdp", "expert", "context", "zigzag"),
    "L": ("fsdp", "context", "zigzag"),
    "O": ("tensor",),
    "H": ("tensor",),
    "F": ("tensor",),
    "E": ("expert",),
}
# Letters of a weight in use and of activations.        B: batch rows, T: positions (S: those of keys, whole)
ACTIVE: dict[str, Axes] = {
    "B": ("data", "fsdp", "expert"),
    "T": ("context", "zigzag"),  # one of them: parallel/fragments.py
    "O": ("tensor",),
    "H": ("tensor",),
    "F": ("tensor",),
    "E": ("expert",),
}
# Mesh axes over which weights are stored and not used, in the order in which they are gathered. One after the other:
# XLA gathers over both at once by an all-reduce of zeros.
GATHERED = ("zigzag", "context", "expert", "fsdp")


def _spec(letters: str, table: dict[str, Axes]) -> PartitionSpec:
    entries, used = [], set()
    for letter in letters:
        axes = _axes_of(letter, table)
        if used & set(axes):
            raise ConfigError(f"sharding '{letters}': axes {sorted(used & set(axes))} are used twice")
        used |= set(axes)
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)


def _axes_of(letter: str, table: dict[str, Axes]) -> Axes:
    """Without the axes of positions that have one device: what is summed over positions would seem to differ on it."""
    sizes = get_abstract_mesh().shape
    return tuple(axis for axis in table.get(letter, ()) if axis not in ACTIVE["T"] or sizes.get(axis, 1) > 1)


def stored(letters: str) -> PartitionSpec:
    """Where a weight with these axes lives."""
    return _spec(letters, STORED)


def active(letters: str) -> PartitionSpec:
    """Where an activation, or a weight in use, with these axes lives."""
    return _spec(letters, ACTIVE)


def precision(dtype: DTypeLike) -> jax.lax.Precision:
    """float32 products in full precision (a TPU's default is one bf16 pass); others as the hardware does them."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def has_mesh() -> bool:
    return not get_abstract_mesh().empty


def pipe_size() -> int:
    """Ranks of the pipeline."""
    return get_abstract_mesh().shape.get("pipe", 1)


def place(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return reshard(x, spec) if has_mesh() else x


def spec_of(x: jax.ShapeDtypeStruct) -> PartitionSpec:
    """How an abstract value is sharded; one that depends on no sharded value (a counter) is on every device."""
    return x.sharding.spec if x.sharding else PartitionSpec()


def zeros_like(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of its shape and dtype, laid out like it."""
    return place(jnp.zeros(x.shape, x.dtype), spec_of(x))


def reshape(x: jax.Array, shape: tuple[int, ...], letters: str) -> jax.Array:
    """`x.reshape(shape)`, laid out by `letters`."""
    return jax.lax.reshape(x, shape, out_sharding=active(letters) if has_mesh() else None)


def use(weight: jax.Array, letters: str, dtype: DTypeLike, out: str) -> jax.Array:
    """A stored weight, cast and gathered for a product laid out by `out`; the gradient is summed over the tokens of
    `out` in `dtype`, and scattered while it is summed.

    In JAX's words the gradient is "unreduced", and so a value whose gradient is so "reduced". Left to itself XLA
    all-reduces a gradient whole and then cuts it.
    """
    weight = weight.astype(dtype)
    if not has_mesh():
        return weight
    tokens = set(_mesh_axes("".join(letter for letter in out if letter in "BT")))
    if get_abstract_mesh().manual_axes:  # a pipeline: XLA has no unreduced values there (it aborts, jaxlib 0.12.0.1)
        tokens = set()
    entries, gathered = tuple(stored(letters)), set()
    for axis in GATHERED:
        if get_abstract_mesh().shape[axis] > 1:
            entries, gathered = tuple(_without(entry, axis) for entry in entries), gathered | {axis}
            weight = reshard(weight, PartitionSpec(*entries, reduced=gathered & tokens))
            weight = jax.lax.optimization_barrier(weight)
    return reshard(weight, PartitionSpec(*active(letters), reduced=tokens))


def _without(entry: str | Axes | None, axis: str) -> Axes | None:
    names = (entry,) if isinstance(entry, str) else entry or ()
    return tuple(name for name in names if name != axis) or None


def einsum(subscripts: str, *operands: jax.Array, out: str, **kwargs) -> jax.Array:
    """`jnp.einsum` whose result is laid out by the letters `out`."""
    return jnp.einsum(subscripts, *operands, out_sharding=active(out) if has_mesh() else None, **kwargs)


def local(fn: Callable, inputs: tuple, outputs) -> Callable:
    """`fn` run on each device's shard; `inputs` and `outputs` are (nested) letter strings, or specs."""
    if not has_mesh():
        return fn
    in_specs, out_specs = jax.tree.map(lambda x: active(x) if isinstance(x, str) else x, (inputs, outputs))
    mesh = get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)  # inside a pipeline `pipe` is taken already
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


def _mesh_axes(letters: str) -> Axes:
    return tuple(axis for letter in letters for axis in _axes_of(letter, ACTIVE))


def axis_of(letter: str) -> str | None:
    """The one mesh axis over which this letter is cut, None if it is whole."""
    sizes = get_abstract_mesh().shape
    return next((axis for axis in ACTIVE[letter] if sizes.get(axis, 1) > 1), None)


def size_of(letter: str) -> int:
    """Over how many devices this letter is cut."""
    return math.prod(get_abstract_mesh().shape[axis] for axis in _mesh_axes(letter)) if has_mesh() else 1


def sum_over(letters: str, x: jax.Array) -> jax.Array:
    """Inside `local`: the sum over the shards of these letters."""
    return jax.lax.psum(x, _mesh_axes(letters)) if has_mesh() else x


def max_over(letters: str, x: jax.Array) -> jax.Array:
    """Inside `local`: the maximum over the shards of these letters (no gradient)."""
    return jax.lax.pmax(x, _mesh_axes(letters)) if has_mesh() else x
