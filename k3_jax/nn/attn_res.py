"""Block Attention Residuals (report §2.2): each sublayer reads a softmax mixture over sums of earlier blocks.

The bank [N, B, T, D] holds one row per started block (row 0 is the embedding): the running prefix at layers
0, S, 2S, ... It is append-only, so a site is described by how many rows exist for it. r [B, T, D] is the running sum.
Scores, softmax and mixture are float32 with highest precision; the mixture is rounded once to r's dtype.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3_jax.config import K3Config
from k3_jax.nn.init import ones, zeros
from k3_jax.nn.linear import param

HIGHEST = jax.lax.Precision.HIGHEST


class AttnRes(nnx.Module):
    """One site: a gain for the keys and a pseudo-query, zero at the start (a uniform average)."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.norm = param(rngs, ones, (config.hidden_size,), "_", dtype)
        self.query = param(rngs, zeros, (config.hidden_size,), "_", dtype)

    def key(self) -> Float[Array, "*s D"]:
        """The vector that scores a normalised source: gain times pseudo-query."""
        return self.norm[...].astype(jnp.float32) * self.query[...].astype(jnp.float32)


def scores(sources: Float[Array, "*r D"], key: Float[Array, " D"], eps: float) -> Float[Array, "*r"]:
    """<source / rms(source), key>, one number per source and token, without 1/sqrt(D)."""
    v = sources.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
    return jnp.einsum("...d,d->...", v, key, precision=HIGHEST) * inverse_rms


def mix(
    bank: Float[Array, "N B T D"],
    rows: Int[Array, ""] | int,
    r: Float[Array, "B T D"],
    key: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
    """The mixture of the bank's first `rows` rows and r (report Eqs. 8-9), and its entropy in nats.

    With rows = 0 it is r exactly: layer 0 has no other source.
    """
    live = (jnp.arange(bank.shape[0]) < rows)[:, None, None]
    s_bank = jnp.where(live, scores(bank, key, eps), -jnp.inf)
    s = jnp.concatenate([s_bank, scores(r, key, eps)[None]])
    p = jax.nn.softmax(s, axis=0)
    mixture = jnp.einsum("nbt,nbtd->btd", p[:-1], bank.astype(jnp.float32), precision=HIGHEST)
    mixture = mixture + p[-1][..., None] * r.astype(jnp.float32)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=0)
    return mixture.astype(r.dtype), jax.lax.stop_gradient(entropy)


@partial(jax.tree_util.register_dataclass, data_fields=["peak", "weight", "value"], meta_fields=[])
@dataclass(frozen=True)
class BankSummary:
    """Phase 1 of the two-phase form, for M sites at once: all that a site needs to know about the bank."""

    peak: Float[Array, "M B T"]  # largest score
    weight: Float[Array, "M B T"]  # sum of exp(score - peak)
    value: Float[Array, "M B T D"]  # sum of exp(score - peak) times source


def summarise(
    bank: Float[Array, "N B T D"], rows: Int[Array, ""] | int, keys: Float[Array, "M D"], eps: float
) -> BankSummary:
    """Phase 1 (report §5.4.2): once per block, for all the sites that read this bank. The bank has a row."""
    live = (jnp.arange(bank.shape[0]) < rows)[:, None, None, None]
    v = bank.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
    s = jnp.einsum("nbtd,md->nmbt", v, keys, precision=HIGHEST) * inverse_rms[:, None]
    s = jnp.where(live, s, -jnp.inf)
    peak = s.max(0)
    p = jnp.exp(s - peak[None])
    return BankSummary(peak, p.sum(0), jnp.einsum("nmbt,nbtd->mbtd", p, v, precision=HIGHEST))


def empty_summary(sites: int, r: Float[Array, "B T D"]) -> BankSummary:
    """A bank without rows: merging it with r gives r."""
    zero = jnp.zeros_like(r, jnp.float32)[None].repeat(sites, 0)
    return BankSummary(zero[..., 0] - 1e30, zero[..., 0], zero)


def merge(
    summary: BankSummary, site: Int[Array, ""] | int, r: Float[Array, "B T D"], key: Float[Array, " D"], eps: float
) -> Float[Array, "B T D"]:
    """Phase 2: add the one source that changes, the running sum r. Equal to `mix` up to rounding."""
    at = partial(jax.lax.dynamic_index_in_dim, index=site, keepdims=False)
    peak, weight, value = at(summary.peak), at(summary.weight), at(summary.value)
    s = scores(r, key, eps)
    top = jnp.maximum(peak, s)
    old, new = jnp.exp(peak - top), jnp.exp(s - top)
    mixture = old[..., None] * value + new[..., None] * r.astype(jnp.float32)
    return (mixture / (old * weight + new)[..., None]).astype(r.dtype)
