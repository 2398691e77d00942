"""Per-Head Muon: momentum, cut into blocks, each block orthogonalised on its own.

The report (§2.5) cuts the momentum of the head projections along heads and keeps other matrices whole; it gives no
constants. Those here are K2's and Moonlight's (arXiv 2502.16982):

    M <- 0.95 M + G          X = (0.95 M + G) / ||.||_F
    5 times: A = X X^T       X <- 3.4445 X + (-4.7750 A + 2.0315 A^2) X
    update = 0.2 sqrt(max(a, b)) X          for each a x b block

An orthonormal a x b matrix has RMS 1 / sqrt(max(a, b)), so every block's update has RMS 0.2, about AdamW's, and one
learning rate serves both. `optax.contrib.muon` is not used: it has no pieces within a block (MLA's K and V halves),
and leaves the collectives of sharded matrices to the compiler, which gathers all of them on every device.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

# Coefficients of the quintic, tuned by Muon's authors for slope at zero: singular values end in about [0.7, 1.2].
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Far below any gradient that matters; makes the block of an expert without tokens exactly zero instead of NaN.
_NORM_EPS = 1e-8
# Numbers orthogonalised at once; more blocks than that go one group after the other, to bound temporary memory.
_GROUP_SIZE = 2**28


@dataclass(frozen=True)
class MuonRule:
    """How a parameter splits into blocks: axes named by letters; those in neither `rows` nor `columns` are batch.

    `axes="C H N|V", rows="C", columns="N|V"` is one C x N and one C x V block per head: a bar cuts an axis of the
    columns into pieces that are orthogonalised apart. Axes in front of `axes` (stacked layers) are batch too.
    """

    axes: str
    rows: str
    columns: str

    @property
    def kind(self) -> str:
        """'per head', 'per expert' or 'whole'."""
        batch = set(self.axes.split()) - set(self.rows.split()) - set(self.columns.split())
        return "per head" if "H" in batch else "per expert" if "E" in batch else "whole"


@dataclass(frozen=True)
class Blocks:
    """A MuonRule bound to a shape: axis positions, and the widths of the pieces of the flattened columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    widths: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return self.batch + self.rows + self.columns


def bind(rule: MuonRule, name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> Blocks:
    """The blocks of parameter `name`; `sizes` gives the letters on either side of a bar.

    Raises ValueError naming the parameter if the shape cannot be what the rule describes.
    """
    axes = rule.axes.split()
    stacked = len(shape) - len(axes)
    if stacked < 0:
        raise ValueError(f"{name}: shape {tuple(shape)} has fewer axes than the rule '{rule.axes}'")
    position = {axis: stacked + i for i, axis in enumerate(axes)}
    rows = tuple(position[axis] for axis in rule.rows.split())
    columns = tuple(position[axis] for axis in rule.columns.split())
    width = math.prod(shape[i] for i in columns)
    widths = tuple(sizes[letter] for letter in rule.columns.split("|")) if "|" in rule.columns else (width,)
    if sum(widths) != width:
        raise ValueError(f"{name}: shape {tuple(shape)} has {width} columns, the rule '{rule.axes}' {widths}")
    batch = tuple(i for i in range(len(shape)) if i not in rows + columns)
    return Blocks(batch, rows, columns, widths)


def _newton_schulz_step(x: Float[Array, "*B a b"]) -> Float[Array, "*B a b"]:
    c1, c3, c5 = _NEWTON_SCHULZ
    # float32 is a request for float32: TPU's default would be one bfloat16 pass
    matmul = functools.partial(jnp.einsum, precision="highest" if x.dtype == jnp.float32 else None)
    gram = matmul("...ij,...kj->...ik", x, x)
    polynomial = c3 * gram + c5 * matmul("...ij,...jk->...ik", gram, gram)
    return c1 * x + matmul("...ij,...jk->...ik", polynomial, x)


def orthogonalize(
    x: Float[Array, "*B a b"], *, steps: int = 5, dtype: DTypeLike = jnp.float32
) -> Float[Array, "*B a b"]:
    """U V^T, roughly, of each matrix U S V^T: the Newton-Schulz iteration in `dtype`, the norm in float32.

    A zero matrix gives zero. Returns `dtype`.
    """
    wide = x.shape[-2] <= x.shape[-1]
    x = (x if wide else jnp.swapaxes(x, -2, -1)).astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True))
    x = (x / (norm + _NORM_EPS)).astype(dtype)
    x = jax.lax.fori_loop(0, steps, lambda _, x: _newton_schulz_step(x), x)
    return x if wide else jnp.swapaxes(x, -2, -1)


def _in_groups(x: Float[Array, "n a b"], *, steps: int) -> Float[Array, "n a b"]:
    count, a, b = x.shape
    one = functools.partial(orthogonalize, steps=steps, dtype=x.dtype)
    group = max(1, _GROUP_SIZE // (a * b))
    return one(x) if count <= group else jax.lax.map(one, x, batch_size=group)


def _batches(pieces: Sequence[Float[Array, "_ _ _"]], layouts: Sequence[frozenset[str]]) -> list[list[int]]:
    """Positions of pieces that are orthogonalised in one call: equal a x b or b x a, few enough numbers in all.

    A model's many small parameters then compile as one iteration per shape. Pieces sharded over other mesh axes stay
    apart: what is the same on all devices must not mix with what is not.
    """
    batches, latest = [], {}
    for i, (piece, layout) in enumerate(zip(pieces, layouts, strict=True)):
        key = (*sorted(piece.shape[1:]), layout)
        batch = latest.get(key)
        if batch is None or sum(pieces[j].size for j in batch) + piece.size > _GROUP_SIZE:
            batch = latest[key] = []
            batches.append(batch)
        batch.append(i)
    return batches


def _orthogonalize_all(
    pieces: Sequence[Float[Array, "_ _ _"]], layouts: Sequence[frozenset[str]], steps: int
) -> list[Float[Array, "_ _ _"]]:
    """Every matrix of every [n, a, b] piece, times sqrt(max(a, b)): RMS 1. `layouts`: mesh axes of each piece."""
    results: list = [None] * len(pieces)
    for batch in _batches(pieces, layouts):
        wide = [_wide(pieces[i]) for i in batch]
        ends = np.cumsum([len(piece) for piece in wide])[:-1]
        updates = jnp.split(_in_groups(jnp.concatenate(wide), steps=steps), ends)
        for i, update in zip(batch, updates, strict=True):
            update = update if pieces[i].shape == update.shape else jnp.swapaxes(update, -2, -1)
            results[i] = math.sqrt(max(update.shape[1:])) * update
    return results


def _wide(x: Float[Array, "n a b"]) -> Float[Array, "n c d"]:
    return x if x.shape[1] <= x.shape[2] else jnp.swapaxes(x, -2, -1)


def _mesh_axes(spec: PartitionSpec, axis: int) -> tuple[str, ...]:
    entry = spec[axis] if axis < len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class _Exchange:
    """How whole blocks of one parameter come to devices and back; of no effect where nothing is sharded.

    Where rows or columns are sharded over `owners` devices, an all-to-all gives each of them whole blocks, as many to
    each (zeros fill up), and a second one takes the updates back: the volume of two shards, not of the parameter.
    `moves` lists (axis of the [block, rows..., columns...] shard, mesh axes it is sharded over).
    """

    blocks: Blocks
    moves: tuple[tuple[int, tuple[str, ...]], ...]
    owners: int

    @staticmethod
    def of(blocks: Blocks, spec: PartitionSpec, mesh_shape: Mapping[str, int]) -> "_Exchange":
        matrix = blocks.rows + blocks.columns
        moves = tuple((1 + i, _mesh_axes(spec, axis)) for i, axis in enumerate(matrix) if _mesh_axes(spec, axis))
        return _Exchange(blocks, moves, math.prod(mesh_shape[name] for _, names in moves for name in names))

    def _transposed(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Local sizes of the batch axes and of the rows' and columns' axes."""
        sizes = tuple(shape[axis] for axis in self.blocks.order)
        return sizes[: len(self.blocks.batch)], sizes[len(self.blocks.batch) :]

    def to_owners(self, x: Float[Array, "*S"]) -> list[Float[Array, "n _ _"]]:
        """A shard -> this device's whole blocks, one array per piece of the columns."""
        batch, matrix = self._transposed(x.shape)
        x = jnp.transpose(x, self.blocks.order).reshape(-1, *matrix)
        x = jnp.pad(x, [(0, -math.prod(batch) % self.owners)] + [(0, 0)] * len(matrix))
        # XLA:CPU would send a device's share that is all zeros as a constant of another layout, and reject it.
        x = jax.lax.optimization_barrier(x)
        for axis, names in self.moves:
            x = jax.lax.all_to_all(x, names, split_axis=0, concat_axis=axis, tiled=True)
        rows = math.prod(x.shape[1 : 1 + len(self.blocks.rows)])
        return jnp.split(x.reshape(len(x), rows, -1), np.cumsum(self.blocks.widths)[:-1], axis=-1)

    def to_shard(self, pieces: Sequence[Float[Array, "n _ _"]], shape: Sequence[int]) -> Float[Array, "*S"]:
        """The inverse of `to_owners`, for a shard of this shape."""
        batch, matrix = self._transposed(shape)
        whole = list(matrix)
        for axis, names in self.moves:
            whole[axis - 1] *= jax.lax.axis_size(names)
        x = jnp.concatenate(pieces, axis=-1)
        x = x.reshape(len(x), *whole)
        for axis, names in reversed(self.moves):
            x = jax.lax.all_to_all(x, names, split_axis=axis, concat_axis=0, tiled=True)
        x = x[: math.prod(batch)].reshape(batch + matrix)
        return jnp.transpose(x, np.argsort(self.blocks.order))


def block_updates(
    leaves: Sequence[Float[Array, "..."]],
    blocks: Sequence[Blocks],
    *,
    steps: int = 5,
    dtype: DTypeLike = jnp.float32,
) -> list[Float[Array, "..."]]:
    """Orthogonalised blocks of RMS 1, each leaf in float32 and in its own layout.

    On an Explicit mesh whole blocks are spread over the devices that hold their rows and columns; devices that hold
    copies of a parameter repeat each other's work, which costs no time and no traffic between slices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    specs = [PartitionSpec() if mesh.empty else jax.typeof(leaf).sharding.spec for leaf in leaves]
    exchanges = [_Exchange.of(b, spec, mesh.shape) for b, spec in zip(blocks, specs, strict=True)]
    layouts = [frozenset(n for i in range(len(spec)) for n in _mesh_axes(spec, i)) for spec in specs]

    def update(shards: list[Float[Array, "..."]]) -> list[Float[Array, "..."]]:
        pieces = [exchange.to_owners(shard) for exchange, shard in zip(exchanges, shards, strict=True)]
        flat, structure = jax.tree.flatten(pieces)
        flat_layouts = [layout for layout, piece in zip(layouts, pieces, strict=True) for _ in piece]
        pieces = jax.tree.unflatten(structure, _orthogonalize_all(flat, flat_layouts, steps))
        return [e.to_shard(p, shard.shape) for e, p, shard in zip(exchanges, pieces, shards, strict=True)]

    # narrow before the exchange: in bfloat16 half the traffic
    narrow = [leaf.astype(dtype) for leaf in leaves]
    sharded = any(entry is not None for spec in specs for entry in spec)
    run = jax.shard_map(update, in_specs=(specs,), out_specs=specs) if sharded else update
    return [leaf.astype(jnp.float32) for leaf in run(narrow)]


class MuonState(NamedTuple):
    """`momentum` has the structure, shapes and sharding of the parameters, in float32."""

    momentum: optax.Updates


def scale_by_muon(
    rules: Sequence[tuple[str, MuonRule]],
    sizes: Mapping[str, int],
    *,
    momentum: float = 0.95,
    steps: int = 5,
    rms: float = 0.2,
    dtype: DTypeLike = jnp.float32,
) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised block by block, of RMS `rms`. `rules`: (name, rule) of each leaf in order.

    `dtype` is the precision of the Newton-Schulz products: bfloat16 is the standard choice.
    """

    def blocks_of(leaves: Sequence[Num[Array, "..."]]) -> list[Blocks]:
        return [bind(rule, name, leaf.shape, sizes) for leaf, (name, rule) in zip(leaves, rules, strict=True)]

    def init(params: optax.Params) -> MuonState:
        blocks_of(jax.tree.leaves(params))  # wrong shapes are an error here, not at the first step
        return MuonState(optax.tree.zeros_like(params, dtype=jnp.float32))

    def update(gradients: optax.Updates, state: MuonState, params: optax.Params | None = None):
        del params
        traces = jax.tree.map(lambda trace, gradient: momentum * trace + gradient, state.momentum, gradients)
        nesterov = jax.tree.map(lambda trace, gradient: momentum * trace + gradient, traces, gradients)
        leaves, structure = jax.tree.flatten(nesterov)
        updates = block_updates(leaves, blocks_of(leaves), steps=steps, dtype=dtype)
        return jax.tree.unflatten(structure, [rms * leaf for leaf in updates]), MuonState(traces)

    return optax.GradientTransformation(init, update)
