"""Decoding: one token per row and step, several steps per call of the device.

B rows, N steps of one call, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from k3_jax import sharding
from k3_jax.config import ConfigError
from k3_jax.nn.transformer import K3, Cache
from k3_jax.serve.cache_rows import check_capacity
from k3_jax.serve.prefill import CHUNK, prefill
from k3_jax.serve.sampling import NOT_FINITE, Sampler, SamplingConfig, sample

GREEDY = SamplingConfig()
ENDED = -2  # in place of a token: the row has ended
STEPS = 16  # per call: the host's share of a call is then small, and text still comes in a stream


@dataclass(frozen=True)
class Completion:
    """The new tokens of a row, without the stop token. `finish_reason` is "stop" or "length"."""

    tokens: list[int]
    finish_reason: str


@partial(jax.tree_util.register_dataclass, data_fields=["cache", "token", "alive", "left"], meta_fields=[])
@dataclass(frozen=True)
class Decoding:
    """Where rows stand: `token` is chosen and not yet in the cache, `left` may still be chosen after it."""

    cache: Cache
    token: Int[Array, " B"]
    alive: Bool[Array, " B"]
    left: Int[Array, " B"]


@jax.jit
def _choose(
    logits: Float[Array, "B V"], cache: Cache, alive: Bool[Array, " B"], left, sampler: Sampler, stop: Int[Array, " n"]
):
    """(token or ENDED, alive, left) after the next token. A stop token and a row without logits end the row."""
    token = jnp.where(alive, sample(logits, cache.lengths, sampler), ENDED)
    left = jnp.where(alive, left - 1, left)
    ended = jnp.any(token[:, None] == stop[None], axis=1) | (token == NOT_FINITE) | (left == 0)
    return token, alive & ~ended, left


@partial(jax.jit, static_argnames=("steps", "dtype"), donate_argnames="state")
def decode_steps(
    model: K3, state: Decoding, sampler: Sampler, stop: Int[Array, " n"], *, steps: int, dtype: DTypeLike
) -> tuple[Int[Array, "N B"], Decoding]:
    """`steps` tokens of every row, ENDED where a row has none; stops early when all rows have ended. Rows that have
    ended are masked out: their caches stay as they are."""

    def step(carry):
        i, state, tokens = carry
        valid = jnp.where(state.alive, 0, -1)[:, None]
        h, cache = model.extend(jnp.maximum(state.token, 0)[:, None], valid, state.cache, dtype)
        token, alive, left = _choose(model.logits(h)[:, 0], cache, state.alive, state.left, sampler, stop)
        return i + 1, Decoding(cache, token, alive, left), tokens.at[i].set(token)

    tokens = sharding.place(jnp.full((steps, *state.token.shape), ENDED, jnp.int32), sharding.active("_B"))
    running = lambda carry: (carry[0] < steps) & jnp.any(carry[1].alive)  # noqa: E731
    _, state, tokens = jax.lax.while_loop(running, step, (0, state, tokens))
    return tokens, state


def decode(
    model: K3,
    logits: Float[Array, "B V"],
    cache: Cache,
    *,
    max_tokens: int,
    sampling: SamplingConfig | Sequence[SamplingConfig] = GREEDY,
    stop: Iterable[int] = (),
    steps: int = STEPS,
    dtype: DTypeLike = jnp.bfloat16,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Streams tokens after a prefill: one array [B] per step, ENDED where a row has ended.

    A row's stop token is its last. The cache is consumed. `sampling` is one for all rows, or one for each.

    Raises:
        ConfigError: no room for max_tokens in the cache or the model's positions.
        FloatingPointError: logits that are not numbers.
    """
    lengths, rows = np.asarray(cache.lengths), len(cache.lengths)
    if max_tokens < 1 or steps < 1:
        raise ConfigError(f"max_tokens = {max_tokens}, steps = {steps}: expected positive integers")
    check_capacity(cache, (lengths + max_tokens - 1).tolist())
    _check_positions(model, lengths, max_tokens)
    configs = [sampling] * rows if isinstance(sampling, SamplingConfig) else list(sampling)
    if len(configs) != rows:
        raise ConfigError(f"sampling = {len(configs)} configurations: expected one, or one for each of {rows} rows")
    return _decode(model, logits, cache, max_tokens, Sampler.of(configs), stop_array(stop), steps, dtype)


def _decode(model, logits, cache, max_tokens, sampler, stop, steps, dtype) -> Iterator[np.ndarray]:
    alive, left = cache.lengths > 0, jnp.full_like(cache.lengths, max_tokens)
    state = Decoding(cache, *_choose(logits, cache, alive, left, sampler, stop))
    yield _checked(state.token, lengths := np.asarray(cache.lengths))
    while np.any(np.asarray(state.alive)):
        tokens, state = decode_steps(model, state, sampler, stop, steps=steps, dtype=dtype)
        for row in np.asarray(tokens):
            if np.all(row == ENDED):
                break
            lengths = lengths + (row != ENDED)
            yield _checked(row, lengths)


def _checked(tokens, lengths: np.ndarray) -> np.ndarray:
    tokens = np.asarray(tokens)
    for row in np.flatnonzero(tokens == NOT_FINITE):
        raise FloatingPointError(f"row {row}: the logits at position {lengths[row]} are not numbers (NaN)")
    return tokens


def _check_positions(model: K3, lengths: np.ndarray, max_tokens: int) -> None:
    limit = model.config.max_positions
    if lengths.max(initial=0) + max_tokens > limit:
        raise ConfigError(
            f"max_tokens = {max_tokens} after {lengths.max()} tokens: expected at most max_positions = {limit} together"
        )


def stop_array(stop: Iterable[int]) -> Int[Array, " n"]:
    """Stop tokens, padded to a power of two from 4 on with a token that never comes: few shapes to compile."""
    stop = sorted(set(stop))
    size = max(4, 1 << max(len(stop) - 1, 0).bit_length())
    return jnp.asarray(stop + [np.iinfo(np.int32).min] * (size - len(stop)), jnp.int32)


def generate(
    model: K3,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: SamplingConfig | Sequence[SamplingConfig] = GREEDY,
    stop: Iterable[int] = (),
    chunk: int = CHUNK,
    steps: int = STEPS,
    dtype: DTypeLike = jnp.bfloat16,
) -> list[Completion]:
    """Completions of a batch of prompts (token ids, none of them empty)."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ConfigError("prompts: expected at least one, and at least one token in each")
    stop, lengths = set(stop), [len(prompt) for prompt in prompts]
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    cache = model.init_cache(len(prompts), room(max(lengths) + max_tokens), dtype)
    filled = prefill(model, tokens, cache, lengths=lengths, chunk=chunk, dtype=dtype)
    options = {"max_tokens": max_tokens, "sampling": sampling, "stop": stop, "steps": steps, "dtype": dtype}
    stream = decode(model, filled.logits, filled.cache, **options)
    columns = np.stack(list(stream), axis=1)
    return [complete(row[row != ENDED].tolist(), stop) for row in columns]


def complete(tokens: list[int], stop: Iterable[int]) -> Completion:
    """The completion of a row from all its tokens, of which a stop token is the last."""
    if tokens and tokens[-1] in stop:
        return Completion(tokens[:-1], "stop")
    return Completion(tokens, "length")


def room(tokens: int, step: int = 256) -> int:
    """A capacity for so many tokens: one of few, so that prompts of similar lengths share compiled programs."""
    return -(-tokens // step) * step
