"""Choosing the next token: greedy, temperature, top-k, top-p; a row's sample depends on its seed and position only.

B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from k3_jax import sharding
from k3_jax.config import ConfigError

NOT_FINITE = -1  # in place of a token: the logits hold a NaN, whose argmax would look like token 0


@dataclass(frozen=True)
class SamplingConfig:
    """Temperature 0 is greedy. Then top-k (0: off), then top-p (1: off), both on the tempered probabilities."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature = {self.temperature}: expected a number >= 0 (0 is greedy)")
        if self.top_k < 0:
            raise ConfigError(f"top_k = {self.top_k}: expected an integer >= 0 (0 is off)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p}: expected a number in (0, 1] (1 is off)")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed = {self.seed}: expected an integer in 0..2^32 - 1")


@partial(jax.tree_util.register_dataclass, data_fields=["temperature", "top_k", "top_p", "seed"], meta_fields=[])
@dataclass(frozen=True)
class Sampler:
    """A SamplingConfig for each row: rows of a batch may differ, and a change compiles nothing."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    seed: UInt[Array, " B"]

    @classmethod
    def of(cls, rows: Sequence[SamplingConfig]) -> "Sampler":
        return cls(
            jnp.asarray([row.temperature for row in rows], jnp.float32),
            jnp.asarray([row.top_k for row in rows], jnp.int32),
            jnp.asarray([row.top_p for row in rows], jnp.float32),
            jnp.asarray([row.seed for row in rows], jnp.uint32),
        )


def sample(logits: Float[Array, "B V"], position: Int[Array, " B"], sampler: Sampler) -> Int[Array, " B"]:
    """The token that follows `position` tokens of each row; NOT_FINITE where the row's logits hold a NaN.

    Gumbel-max with noise from the row's seed and position: neither the batch, the chunks of the prefill nor how many
    steps run per call change a sample.
    """
    letters = ("B_", "B", Sampler("B", "B", "B", "B"))
    arguments = jax.tree.map(lambda x, s: sharding.place(x, sharding.active(s)), (logits, position, sampler), letters)
    return sharding.local(choose, letters, "B")(*arguments)


def choose(logits: Float[Array, "B V"], position: Int[Array, " B"], sampler: Sampler) -> Int[Array, " B"]:
    """`sample` of rows that are all on one device."""
    logits = logits.astype(jnp.float32)
    greedy = jnp.argmax(logits, axis=-1)
    token = jax.lax.cond(
        jnp.any(sampler.temperature > 0), lambda: _draw(logits, position, sampler, greedy), lambda: greedy
    )
    return jnp.where(jnp.any(jnp.isnan(logits), axis=-1), NOT_FINITE, token).astype(jnp.int32)


def _draw(logits, position, sampler: Sampler, greedy) -> Int[Array, " B"]:
    hot = sampler.temperature > 0
    logits = logits / jnp.where(hot, sampler.temperature, 1.0)[:, None]
    cut = jnp.any((sampler.top_k > 0) | (sampler.top_p < 1))
    keep = jax.lax.cond(cut, lambda: kept(logits, sampler.top_k, sampler.top_p), lambda: ~jnp.isnan(logits))
    noise = jax.vmap(partial(_gumbel, size=logits.shape[-1]))(sampler.seed, position)
    return jnp.where(hot, jnp.argmax(jnp.where(keep, logits + noise, -jnp.inf), axis=-1), greedy)


def kept(logits: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]) -> Bool[Array, "B V"]:
    """Which tokens may be drawn: the k most likely ones, and of these the fewest whose probability reaches top_p.

    Exactly k stay where logits are equal (the lower ids), and the most likely token always does.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])[None]
    in_k = (rank < top_k[:, None]) | (top_k[:, None] == 0)
    p = jax.nn.softmax(jnp.where(in_k, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    ranked_keep = in_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1) | (rank == 0))
    return jnp.take_along_axis(ranked_keep, jnp.argsort(order, axis=-1), axis=-1)


def _gumbel(seed: UInt[Array, ""], position: Int[Array, ""], size: int) -> Float[Array, " V"]:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (size,), jnp.float32)
