"""One decoder layer: two AttnRes sites, a token mixer (KDA or MLA) and a channel mixer (dense or LatentMoE)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3_jax.config import K3Config
from k3_jax.nn.attn_res import AttnRes, BankSummary, merge, mix, summarise
from k3_jax.nn.init import ones
from k3_jax.nn.kda import KDA, init_state
from k3_jax.nn.linear import MLP, param
from k3_jax.nn.mla import MLA
from k3_jax.nn.moe import LatentMoE
from k3_jax.nn.norm import rms_norm


@dataclass(frozen=True)
class Kind:
    """What a layer is made of; layers of one kind share a traced body."""

    mla: bool
    moe: bool


def kind(config: K3Config, layer: int) -> Kind:
    return Kind(config.is_mla(layer), config.is_moe(layer))


class Block(nnx.Module):
    """Exactly one of `kda` / `mla` and one of `dense` / `moe` is present."""

    def __init__(self, config: K3Config, kind: Kind, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = config
        self.kind = kind
        self.attn_res = AttnRes(config, rngs=rngs, dtype=dtype)
        self.attn_norm = param(rngs, ones, (config.hidden_size,), "_", dtype)
        self.ffn_res = AttnRes(config, rngs=rngs, dtype=dtype)
        self.ffn_norm = param(rngs, ones, (config.hidden_size,), "_", dtype)
        if kind.mla:
            self.mla = MLA(config, rngs=rngs, dtype=dtype)
        else:
            self.kda = KDA(config, rngs=rngs, dtype=dtype)
        if kind.moe:
            self.moe = LatentMoE(config, rngs=rngs, dtype=dtype)
        else:
            self.dense = MLP(config, config.dense_dim, rngs=rngs, dtype=dtype)

    def __call__(
        self, layer: Int[Array, ""] | int, r: Float[Array, "B T D"], bank: Float[Array, "N B T D"], segment_ids
    ) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """The running sum after layer number `layer` (0-based, traced), and what the layer reports.

        At the first layer of an AttnRes block the caller has put r into the bank; the sum starts anew.
        """
        eps, S = self.config.norm_eps, self.config.attn_res_block
        h, attn_entropy = mix(bank, -(-layer // S), r, self.attn_res.key(), eps)
        a, report = self._mix_tokens(rms_norm(h, self.attn_norm[...], eps), segment_ids)
        r = jnp.where(layer % S == 0, a, r + a)
        h, ffn_entropy = mix(bank, layer // S + 1, r, self.ffn_res.key(), eps)
        m, router = self._mix_channels(rms_norm(h, self.ffn_norm[...], eps), segment_ids)
        live = segment_ids >= 0
        entropy = jnp.where(live, attn_entropy + ffn_entropy, 0.0).sum() / jnp.maximum(2 * live.sum(), 1)
        return r + m, {"attn_res_entropy": entropy} | report | router

    def extend(self, layer, r, bank, summary: BankSummary, keys, segment_ids, start, cache):
        """Inference: as `__call__`, with a cache and the two-phase mixture.

        `keys` [2L + 1, D] are the sites in reading order; `summary` describes the bank to the sites
        2nS + 1 .. 2(n + 1)S, n the AttnRes block of the layer before. Returns (r, bank, summary, cache).
        """
        eps, S = self.config.norm_eps, self.config.attn_res_block
        h = merge(summary, (2 * layer - 1) % (2 * S), r, self.attn_res.key(), eps)
        bank, summary = push(bank, summary, keys, layer, r, self.config)
        x = rms_norm(h, self.attn_norm[...], eps)
        if self.kind.mla:
            a, cache = self.mla.extend(x, segment_ids, start, cache)
        else:
            a, cache = self.kda(x, segment_ids, cache)
        r = jnp.where(layer % S == 0, a, r + a)
        h = merge(summary, (2 * layer) % (2 * S), r, self.ffn_res.key(), eps)
        m, _ = self._mix_channels(rms_norm(h, self.ffn_norm[...], eps), segment_ids)
        return r + m, bank, summary, cache

    def _mix_tokens(self, x, segment_ids):
        if self.kind.mla:
            a, peak = self.mla(x, segment_ids)
            return a, {"max_logit": peak}
        a, _ = self.kda(x, segment_ids, init_state(self.config, x.shape[0], x.dtype))
        return a, {}

    def _mix_channels(self, x, segment_ids):
        if self.kind.moe:
            m, stats = self.moe(x, segment_ids)
            return m, {"router": stats}
        return self.dense(x), {}


def push(bank, summary: BankSummary, keys, layer, r, config: K3Config):
    """At the first layer of an AttnRes block: r becomes a row of the bank, and phase 1 is done for its 2S sites."""
    S = config.attn_res_block

    def start_block(bank, summary):
        bank = jax.lax.dynamic_update_index_in_dim(bank, r.astype(bank.dtype), layer // S, 0)
        sites = jax.lax.dynamic_slice_in_dim(keys, 2 * layer + 1, 2 * S, 0)
        return bank, summarise(bank, layer // S + 1, sites, config.norm_eps)

    return jax.lax.cond(layer % S == 0, start_block, lambda bank, summary: (bank, summary), bank, summary)
