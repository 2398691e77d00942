"""Prefill: prompts of any lengths through the model in chunks of one compiled shape.

Prompts are compacted to the left first, so the model sees padding only at the right. Chunks end at multiples of the
chunk size, counted from each row's own first token: a row's states depend neither on where its padding stood nor on
which boundaries were asked for, and a row that stops and goes on at a multiple is computed as if it had not stopped.

B rows, T width of the given token array, P tokens of a chunk, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax import sharding
from k3_jax.config import ConfigError
from k3_jax.nn.transformer import K3, Cache
from k3_jax.serve.cache_rows import Boundary, check_capacity, reset, save_boundary
from k3_jax.serve.inputs import check_vocabulary

CHUNK = 256


@dataclass(frozen=True)
class Prefilled:
    """`logits` are those of each row's last new token, float32; zeros for a row that got none."""

    logits: Float[Array, "B V"]
    cache: Cache
    boundaries: dict[int, Boundary]


@dataclass(frozen=True)
class _Prompts:
    """Compacted tokens, and the length of each row before and after them."""

    tokens: np.ndarray  # [B, T] int32
    start: np.ndarray  # [B]
    end: np.ndarray

    def clip(self, length: int) -> np.ndarray:
        """Where each row stands when everything below `length` is done."""
        return np.clip(length, self.start, self.end)

    def chunk(self, begin: np.ndarray, stop: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [B, width] from `begin` to `stop` of each row, and `valid` as K3.extend wants it."""
        tokens, valid = np.zeros((len(begin), width), np.int32), np.full((len(begin), width), -1, np.int32)
        for row, (i, j) in enumerate(zip(begin - self.start, stop - self.start, strict=True)):
            tokens[row, : j - i], valid[row, : j - i] = self.tokens[row, i:j], 0
        return tokens, valid


def prefill(
    model: K3,
    tokens: np.ndarray | Array,
    cache: Cache,
    *,
    mask: np.ndarray | Array | None = None,
    lengths: Sequence[int] | np.ndarray | None = None,
    chunk: int = CHUNK,
    boundaries: int | Sequence[int] = (),
    dtype: DTypeLike = jnp.bfloat16,
) -> Prefilled:
    """Adds prompts to the rows of a cache.

    Args:
        tokens: [B, T]. A row goes on where its cache stands; a row of length 0 is made empty first, whatever it held.
        cache: consumed, as its buffers are reused; `cache_rows.select` makes a copy to go on from it again.
        mask: [B, T], true at tokens. Padding may stand anywhere.
        lengths: the tokens of each row, instead of `mask`, where padding stands at the right. Without both: all T.
        chunk: tokens per call of the model. It changes speed and memory, and results only by rounding.
        boundaries: lengths at which to save states, or one number for all its multiples. A row that ends before one
            has its last state saved there, a row that began after it its first.
    Raises:
        ConfigError: more tokens than the cache's capacity or the model's positions, a token outside the vocabulary,
            mask or lengths that do not fit the tokens, a boundary that no row reaches.
    """
    if chunk < 1:
        raise ConfigError(f"chunk = {chunk}: expected a positive number of tokens")
    tokens, counts = compact(tokens, mask, lengths)
    start = np.asarray(cache.lengths)
    if len(tokens) != len(start):
        raise ConfigError(f"tokens = {len(tokens)} rows: expected {len(start)}, as the cache has")
    prompts = _Prompts(tokens, start, start + counts)
    check_vocabulary(tokens, model.config, "tokens")
    _check_room(model, cache, prompts)
    wanted, saved = _boundary_lengths(boundaries, prompts), {}
    cache = reset(cache, jnp.asarray((start == 0) & (counts > 0)))
    last = sharding.place(jnp.zeros((len(tokens), model.config.hidden_size), dtype), sharding.active("BD"))
    # Committed to their devices, as what a step returns is: else the second step would compile again.
    cache, last = jax.tree.map(lambda x: jax.device_put(x, x.sharding), (cache, last))
    for low, high in _windows(prompts, chunk):
        begin, stop = prompts.clip(low), prompts.clip(high)
        for at in (at for at in wanted if low < at <= high and np.any(prompts.clip(at) != stop)):
            # Inside the chunk: a step aside, exactly as if the prompts ended there.
            aside, valid = prompts.chunk(begin, prompts.clip(at), chunk)
            _, at_boundary = _step(model, aside, valid, jax.tree.map(jnp.copy, cache), last)
            saved[at] = save_boundary(at_boundary, jnp.asarray(begin), chunk)
        last, cache = _step(model, *prompts.chunk(begin, stop, chunk), cache, last)
        for at in (at for at in wanted if low < at <= high and at not in saved):
            saved[at] = save_boundary(cache, jnp.asarray(begin), chunk)
    return Prefilled(_logits(model, last), cache, saved)


@partial(jax.jit, donate_argnames="cache")
def _step(model: K3, tokens: Int[Array, "B P"], valid: Int[Array, "B P"], cache: Cache, last: Float[Array, "B D"]):
    """One chunk; also the state of each row's last token, or the earlier `last` where the row had none."""
    tokens, valid = (sharding.place(x, sharding.active("BT")) for x in (tokens, valid))
    h, cache = model.extend(tokens, valid, cache, last.dtype)
    count = jnp.sum(valid >= 0, axis=1)[:, None]
    is_last = jnp.arange(tokens.shape[1])[None] == count - 1
    newest = jnp.sum(jnp.where(is_last[..., None], h, 0), axis=1, dtype=h.dtype)
    return jnp.where(count > 0, newest, last), cache


@jax.jit
def _logits(model: K3, last: Float[Array, "B D"]) -> Float[Array, "B V"]:
    return model.logits(last[:, None])[:, 0]


def compact(
    tokens: np.ndarray | Array, mask: np.ndarray | Array | None, lengths: Sequence[int] | np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens with all padding moved to the right, and the number of tokens in each row. The order is kept."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(f"tokens = {tokens.dtype} {tokens.shape}: expected integers [B, T]")
    if mask is not None and lengths is not None:
        raise ConfigError("mask and lengths: expected at most one of them")
    if lengths is not None:
        lengths = np.asarray(lengths)
        if lengths.shape != tokens.shape[:1] or np.any((lengths < 0) | (lengths > tokens.shape[1])):
            raise ConfigError(f"lengths = {lengths.tolist()}: expected 0..{tokens.shape[1]} for each row of tokens")
        mask = np.arange(tokens.shape[1])[None] < lengths[:, None]
    mask = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask).astype(bool)
    if mask.shape != tokens.shape:
        raise ConfigError(f"mask.shape = {mask.shape}: expected {tokens.shape}, as tokens")
    order = np.argsort(~mask, axis=1, kind="stable")
    counts = mask.sum(axis=1)
    live = np.arange(tokens.shape[1])[None] < counts[:, None]
    return np.where(live, np.take_along_axis(tokens, order, axis=1), 0), counts


def _check_room(model: K3, cache: Cache, prompts: _Prompts) -> None:
    check_capacity(cache, prompts.end.tolist())
    limit = model.config.max_positions
    if len(prompts.end) and prompts.end.max() > limit:
        row, length = prompts.end.argmax(), prompts.end.max()
        raise ConfigError(f"row {row} = {length} tokens: expected at most max_positions = {limit}")


def _boundary_lengths(boundaries: int | Sequence[int], prompts: _Prompts) -> list[int]:
    low, high = int(prompts.start.min(initial=0)), int(prompts.end.max(initial=0))
    if isinstance(boundaries, int):
        if boundaries < 1:
            raise ConfigError(f"boundaries = {boundaries}: expected a positive number of tokens")
        return [at for at in range(boundaries, high + 1, boundaries) if at > low]
    for at in boundaries:
        if not low < at <= high:
            raise ConfigError(f"boundaries = {at}: expected lengths in {low + 1}..{high}, which the rows pass")
    return sorted(set(boundaries))


def _windows(prompts: _Prompts, chunk: int) -> Iterator[tuple[int, int]]:
    """The spans [low, high) between multiples of `chunk` in which some row has tokens."""
    for low in range(0, int(prompts.end.max(initial=0)), chunk):
        if np.any(prompts.clip(low) < prompts.clip(low + chunk)):
            yield low, low + chunk
