"""Quantile Balancing: the router's bias, set once per step from a histogram (K3 report §2.3.3, Appendices C and D).

A token i takes the k experts with the largest biased scores s_ij + b_j; its cutoff alpha_i is the (k+1)-th. Expert j
would take the token with any bias above r_ij = alpha_i - s_ij, so the bias that gives it its fair share q = m k / n of
the m tokens is the (k/n)-quantile of r_:j. The quantile is read from a histogram of integer counts, which is the same
however the tokens were split over devices and micro-batches. The bias chosen in a step routes from the next step on; it
is no parameter of the loss, and never part of a routing weight.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

# Bins per row of the two-level count; a matrix unit's width.
_LOW_BINS = 128
# Tokens per block of the two-level count: bounds the one-hot operands.
_COUNT_BLOCK = 512


def _bin_range(bias: Float[Array, "*L E"], bins: int) -> tuple[Float[Array, "*L 1"], Float[Array, "*L 1"]]:
    """(lower edge, bin width). Scores lie in [0, 1], so every r lies in [min b - 1, max b + 1]."""
    low = jnp.min(bias, axis=-1, keepdims=True)
    high = jnp.max(bias, axis=-1, keepdims=True)
    return low - 1.0, (high - low + 2.0) / bins


def cutoff(scores: Float[Array, "T E"], bias: Float[Array, "E"], top_k: int) -> Float[Array, "T"]:
    """alpha: each token's (k+1)-th largest biased score."""
    return jax.lax.top_k(scores + bias[None, :], top_k + 1)[0][:, top_k]


def histogram(
    scores: Float[Array, "T E"], bias: Float[Array, "E"], top_k: int, bins: int, valid: Bool[Array, "T"]
) -> Int32[Array, "E {bins}"]:
    """Counts of the required bias per expert, over the valid tokens.

    `scores` are the router's float32 sigmoids (not logits), `bias` the one that routed these tokens. Counts of
    micro-batches and of shards of the tokens add up as long as that bias is the same.
    """
    scores, bias = jax.lax.stop_gradient((scores, bias))
    low, width = _bin_range(bias, bins)
    required = cutoff(scores, bias, top_k)[:, None] - scores
    index = jnp.clip(jnp.floor((required - low[None, :]) / width[None, :]), 0, bins - 1).astype(jnp.int32)
    return _count(index, valid, bins)


def _count(index: Int32[Array, "T E"], valid: Bool[Array, "T"], bins: int) -> Int32[Array, "E {bins}"]:
    """How often each bin occurs per expert. Both ways are exact; a scatter is serial on a TPU."""
    return jax.lax.platform_dependent(
        index,
        valid,
        cpu=lambda index, valid: count_by_scatter(index, valid, bins),
        default=lambda index, valid: count_by_matmul(index, valid, bins),
    )


def count_by_scatter(index: Int32[Array, "T E"], valid: Bool[Array, "T"], bins: int) -> Int32[Array, "E {bins}"]:
    num_experts = index.shape[1]
    flat = index + bins * jnp.arange(num_experts, dtype=jnp.int32)[None, :]
    ones = jnp.broadcast_to(valid[:, None].astype(jnp.int32), index.shape)
    counts = jnp.zeros(num_experts * bins, jnp.int32)
    return counts.at[flat.reshape(-1)].add(ones.reshape(-1)).reshape(num_experts, bins)


def count_by_matmul(index: Int32[Array, "T E"], valid: Bool[Array, "T"], bins: int) -> Int32[Array, "E {bins}"]:
    """Bin = 128 high + low: counts are products of two one-hot matrices, summed over tokens.

    The products are 0 or 1 and a block has fewer than 2^24 tokens, so float32 accumulation is exact.
    """
    tokens, num_experts = index.shape
    rows = -(-bins // _LOW_BINS)
    padding = -tokens % _COUNT_BLOCK
    index = jnp.pad(index, ((0, padding), (0, 0))).reshape(-1, _COUNT_BLOCK, num_experts)
    valid = jnp.pad(valid, (0, padding)).reshape(-1, _COUNT_BLOCK)

    def block(index_and_valid: tuple[Int32[Array, "t E"], Bool[Array, "t"]]) -> Int32[Array, "E R C"]:
        index, valid = index_and_valid
        high = (index[..., None] // _LOW_BINS == jnp.arange(rows)[None, None, :]) & valid[:, None, None]
        low = index[..., None] % _LOW_BINS == jnp.arange(_LOW_BINS)[None, None, :]
        operands = (high.astype(jnp.bfloat16), low.astype(jnp.bfloat16))
        return jnp.einsum("ter,tec->erc", *operands, preferred_element_type=jnp.float32).astype(jnp.int32)

    def add(total: Int32[Array, "E R C"], index_and_valid: tuple) -> tuple[Int32[Array, "E R C"], None]:
        return total + block(index_and_valid), None

    # the first block starts the sum: a constant would lack the tokens' mesh axes inside shard_map
    total, _ = jax.lax.scan(add, block((index[0], valid[0])), (index[1:], valid[1:]))
    return total.reshape(num_experts, rows * _LOW_BINS)[:, :bins]


def updated_bias(counts: Int32[Array, "*L E B"], bias: Float[Array, "*L E"], top_k: int) -> Float[Array, "*L E"]:
    """The bias of the next step: per expert the (k/n)-quantile of the required bias, then minus the mean.

    `counts` is the step's sum of `histogram`, `bias` the one it was made with. The first bin with a cumulative count
    of at least ceil(q) holds the quantile, and q places it within the bin (Appendix D): at most one bin's width from
    the ceil(q)-th smallest r. Any value up to the next r gives an expert the same load; for a handful of tokens that
    gap is wide, and §2.3.3's exact form, minus the (q+1)-th largest margin, is its other end.
    Without any valid token the bias stays as it is. All counting is in integers: m k may exceed float32's 2^24.
    """
    num_experts, bins = counts.shape[-2:]
    tokens = jnp.sum(counts, axis=-1)
    # q = whole + part / n, without the product m k, which could overflow
    whole = top_k * (tokens // num_experts) + top_k * (tokens % num_experts) // num_experts
    part = top_k * (tokens % num_experts) % num_experts
    target = whole + (part > 0)

    cumulative = jnp.cumsum(counts, axis=-1)
    reached = cumulative >= target[..., None]
    index = jnp.sum(~reached, axis=-1)
    before = jnp.max(jnp.where(reached, 0, cumulative), axis=-1)
    in_bin = jnp.min(jnp.where(reached, cumulative, jnp.iinfo(jnp.int32).max), axis=-1) - before
    into = (whole - before).astype(jnp.float32) + part.astype(jnp.float32) / num_experts
    position = index.astype(jnp.float32) + jnp.clip(into / jnp.maximum(in_bin, 1).astype(jnp.float32), 0.0, 1.0)

    low, width = _bin_range(bias, bins)
    quantile = low + position * width
    balanced = quantile - jnp.mean(quantile, axis=-1, keepdims=True)
    return jnp.where(tokens > 0, balanced, bias)


def expert_load(routes: Int[Array, "T k"], num_experts: int, valid: Bool[Array, "T"]) -> Int32[Array, "{num_experts}"]:
    """Valid tokens per expert; `routes` are the chosen experts."""
    ones = jnp.broadcast_to(valid[:, None].astype(jnp.int32), routes.shape)
    return jnp.zeros(num_experts, jnp.int32).at[routes.reshape(-1)].add(ones.reshape(-1))


class LoadStats(NamedTuple):
    """`max_violation`: largest load / mean load - 1, so 0 is perfect; `dead_fraction`: experts without a token."""

    max_violation: Float[Array, "*L"]
    dead_fraction: Float[Array, "*L"]


def load_stats(load: Int[Array, "*L E"]) -> LoadStats:
    """Balance of tokens per expert. Without any token both numbers say 'balanced'."""
    load = load.astype(jnp.float32)
    mean = jnp.mean(load, axis=-1)
    empty = mean == 0
    violation = jnp.max(load, axis=-1) / jnp.where(empty, 1.0, mean) - 1.0
    dead = jnp.mean((load == 0).astype(jnp.float32), axis=-1)
    return LoadStats(jnp.where(empty, 0.0, violation), jnp.where(empty, 0.0, dead))
