"""Operations on the rows of a cache, all pure: select, insert, copy, fork, reset, and truncate to a boundary.

An MLA cache can be cut at any length, since it holds one record per token. A KDA state cannot: it is a fold over all
tokens so far, so the only lengths that a row can return to are those at which its state was saved. A `Boundary` is such
a saved state (`prefill` makes them), and `truncate` takes one instead of a length.

B rows, S capacity in tokens, P tokens of a prefill chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from k3_jax import sharding
from k3_jax.config import ConfigError
from k3_jax.nn.kda import KDAState
from k3_jax.nn.mla import MLACache
from k3_jax.nn.transformer import Cache

ROW_AXIS = 2  # of every leaf in Cache.layers: [repeat, count, B, ...]

Layer = KDAState | MLACache


@partial(jax.tree_util.register_dataclass, data_fields=["layers", "starts", "lengths"], meta_fields=[])
@dataclass(frozen=True)
class Boundary:
    """What is needed to return rows to an earlier length; the rest is in any later cache of the same rows.

    `layers` is shaped like Cache.layers: the KDA states at the boundary, and of the MLA caches the records of the chunk
    that the boundary lies in, from `starts` on ([..., B, P, CR]): their last bits depend on where the chunk ends.
    """

    layers: list[list[Layer]]
    starts: Int[Array, " B"]
    lengths: Int[Array, " B"]  # the rows' tokens at the boundary; less than asked for where a row was shorter


def _map_layers(fn: Callable[..., Layer], *layers: list[list[Layer]]) -> list[list[Layer]]:
    """`fn` on every KDAState or MLACache."""
    is_layer = lambda x: isinstance(x, KDAState | MLACache)  # noqa: E731
    return jax.tree.map(fn, *layers, is_leaf=is_layer)


def capacity(cache: Cache) -> int | None:
    """Tokens that a row can hold; None for a model without MLA layers, whose states never fill up."""
    sizes = {x.latent.shape[-2] for runs in cache.layers for x in runs if isinstance(x, MLACache)}
    return sizes.pop() if sizes else None


def check_capacity(cache: Cache, lengths: Sequence[int]) -> None:
    """ConfigError that names the first row whose `lengths` entry is more than the cache can hold."""
    size = capacity(cache)
    for row, length in enumerate(lengths):
        if size is not None and length > size:
            raise ConfigError(f"cache row {row} = {length} tokens: expected at most the cache's capacity of {size}")


def select(cache: Cache, rows: Int[Array, " R"] | Sequence[int]) -> Cache:
    """A new cache of the given rows in the given order; a row may be named more than once."""
    rows = jnp.asarray(rows, jnp.int32)
    take = lambda x: jnp.take(x, rows, axis=ROW_AXIS)  # noqa: E731
    return Cache(jax.tree.map(take, cache.layers), jnp.take(cache.lengths, rows))


def insert(cache: Cache, rows: Int[Array, " R"] | Sequence[int], new: Cache) -> Cache:
    """`cache` with `rows` replaced by the rows of `new`; everything of them, so nothing of an old owner is left.

    Raises:
        ConfigError: another capacity, or another number of rows than `rows` names.
    """
    rows = jnp.asarray(rows, jnp.int32)
    if capacity(cache) != capacity(new):
        raise ConfigError(f"inserted capacity = {capacity(new)}: expected {capacity(cache)}, that of the cache")
    if rows.shape != new.lengths.shape:
        raise ConfigError(f"rows = {rows.shape[0]}: expected {new.lengths.shape[0]}, as many as the inserted cache has")
    layers = jax.tree.map(lambda x, y: x.at[:, :, rows].set(y.astype(x.dtype)), cache.layers, new.layers)
    return Cache(layers, cache.lengths.at[rows].set(new.lengths))


def copy(cache: Cache, source: int, target: int) -> Cache:
    """`cache` with row `target` made equal to row `source`."""
    return insert(cache, [target], select(cache, [source]))


def fork(cache: Cache, row: int, n: int) -> Cache:
    """`n` rows that all continue row `row`: one prompt, several samples."""
    return select(cache, [row] * n)


@jax.jit
def reset(cache: Cache, rows: Bool[Array, " B"]) -> Cache:
    """`cache` with the rows where `rows` is true made empty. Zeros are written: an old NaN must not survive,
    since a masked key has weight 0 and 0 times NaN is NaN."""
    rows = sharding.place(rows, sharding.active("B"))

    def clear(x):
        return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - ROW_AXIS - 1)), jnp.zeros_like(x), x)

    return Cache(jax.tree.map(clear, cache.layers), jnp.where(rows, 0, cache.lengths))


@partial(jax.jit, static_argnames="width")
def save_boundary(cache: Cache, starts: Int[Array, " B"], width: int) -> Boundary:
    """The boundary at which `cache` stands, whose last chunk began at `starts` and spans at most `width` tokens."""

    def save(layer: Layer) -> Layer:
        if isinstance(layer, KDAState):
            return layer
        at = starts[:, None] + jnp.arange(width)[None]
        return MLACache(_take_records(layer.latent, at))

    return Boundary(_map_layers(save, cache.layers), starts, cache.lengths)


@jax.jit
def truncate(cache: Cache, boundary: Boundary) -> Cache:
    """The rows of `cache` returned to a boundary saved earlier from the same rows: bit-equal to a cache whose prefill
    stopped there. To return only some rows, `select` them first and `insert` the result."""

    def restore(layer: Layer, saved: Layer) -> Layer:
        if isinstance(layer, KDAState):
            return saved
        position = jnp.arange(layer.latent.shape[-2])[None]
        starts, lengths = boundary.starts[:, None], boundary.lengths[:, None]
        tail = _take_records(saved.latent, position - starts)
        latent = jnp.where((position >= starts)[..., None], tail, layer.latent)
        return MLACache(jnp.where((position < lengths)[..., None], latent, 0))

    return Cache(_map_layers(restore, cache.layers, boundary.layers), boundary.lengths)


def _take_records(latent: Array, at: Int[Array, "B N"]) -> Array:
    """Records `at` [B, N] of every row of [repeat, count, B, S, CR]; those outside are some record inside."""
    at = at.clip(0, latent.shape[-2] - 1)
    return jnp.take_along_axis(latent, at[None, None, :, :, None], axis=-2)
