"""Gated multi-head latent attention without positions (report §2.1.2).

N, R: widths of the two parts of a key ("nope" and the shared extra part, which is not rotated); C latent rank,
Q query rank, V value width. Training expands keys and values from the latent; decoding absorbs the expansion
into the query and attends to the latents themselves: the same scale (N + R) ** -0.5.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax import sharding
from k3_jax.config import K3Config
from k3_jax.nn.activations import named
from k3_jax.nn.init import normal, ones
from k3_jax.nn.linear import param, project
from k3_jax.nn.norm import rms_norm
from k3_jax.parallel.fragments import layout_in_use
from k3_jax.sharding import precision
from pallas_kernels.attention.api import blockwise_attention, mla_attention
from pallas_kernels.common.dispatch import vary_alike

# Bytes of keys and values that are expanded at once; all heads of a row of 10^6 tokens would take 50 GB.
EXPANDED = 2**31


@partial(jax.tree_util.register_dataclass, data_fields=["latent"], meta_fields=[])
@dataclass(frozen=True)
class MLACache:
    """[normalised latent | extra key] of every position so far; how many are valid is kept by the model's cache."""

    latent: Float[Array, "*s B S CR"]


def init_cache(config: K3Config, batch: int, capacity: int, dtype: DTypeLike) -> MLACache:
    latent = jnp.zeros((batch, capacity, config.mla.cache_dim), dtype)
    return MLACache(sharding.place(latent, sharding.active("BS_")))


class MLA(nnx.Module):
    def __init__(self, config: K3Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        init, D, c = normal(config.init_std), config.hidden_size, config.mla
        H, N, R, V = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        self.config = config
        self.q_a = param(rngs, init, (D, c.q_lora_rank), "D_", dtype)
        self.q_a_norm = param(rngs, ones, (c.q_lora_rank,), "_", dtype)
        self.q_b = param(rngs, init, (c.q_lora_rank, H, N + R), "LH_", dtype)
        self.kv_a = param(rngs, init, (D, c.kv_lora_rank + R), "D_", dtype)
        self.kv_a_norm = param(rngs, ones, (c.kv_lora_rank,), "_", dtype)
        self.kv_b = param(rngs, init, (c.kv_lora_rank, H, N + V), "LH_", dtype)
        self.g = param(rngs, init, (D, H, V), "DHV", dtype)
        self.o = param(rngs, init, (H, V, D), "HVD", dtype)

    def __call__(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, " H"]]:
        """Training form: keys and values expanded. Also returns the largest logit of each head (for QK-clip)."""
        c = self.config.mla
        attend = sharding.local(
            partial(_expanded, scale=c.qk_head_dim**-0.5),
            ("BTH_", "BTH_", "BT_", "LH_", "BT"),
            ("BTH_", "H"),
        )
        kv_b = sharding.place(self.kv_b[...].astype(x.dtype), sharding.active("LH_"))
        o, peak = attend(*self._query(x), self._latent(x), kv_b, segment_ids)
        return self._output(x, named("mla_output", o)), peak

    def extend(
        self, x: Float[Array, "B T D"], valid: Int[Array, "B T"], start: Int[Array, " B"], cache: MLACache
    ) -> tuple[Float[Array, "B T D"], MLACache]:
        """Inference form: T new positions per row after `start` cached ones. `valid` < 0 marks right padding,
        which is neither cached nor attended to. Raises nothing when the cache is full: the caller checks."""
        c, dtype = self.config.mla, x.dtype
        (q_nope, q_pe), kv_b = self._query(x), sharding.use(self.kv_b[...], "LH_", dtype, "BTH_")
        absorbed = sharding.einsum(
            "bthn,chn->bthc", q_nope, kv_b[..., : c.qk_nope_head_dim], out="BTH_", precision=precision(dtype)
        )
        attend = sharding.local(
            partial(_absorbed, rank=c.kv_lora_rank, scale=c.qk_head_dim**-0.5),
            ("BTH_", "BT_", "BT", "B", "BS_"),
            ("BTH_", "BS_"),
        )
        context, latent = attend(
            jnp.concatenate([absorbed, q_pe], axis=-1), self._latent(x), valid, start, cache.latent
        )
        o = sharding.einsum(
            "bthc,chv->bthv", context, kv_b[..., c.qk_nope_head_dim :], out="BTHV", precision=precision(dtype)
        )
        return self._output(x, o), MLACache(latent)

    def _query(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H N"], Float[Array, "B T H R"]]:
        """Its two parts, each a product of its own: the kernels take them apart, and a weight is cheaper to cut."""
        q = rms_norm(
            project("btd,dq->btq", x, self.q_a, "D_", "BT_"), self.q_a_norm[...], self.config.mla.latent_norm_eps
        )
        q = named("mla_query", q)
        weights = jnp.split(self.q_b[...], [self.config.mla.qk_nope_head_dim], axis=-1)
        nope, pe = (project("btq,qhk->bthk", q, weight, "LH_", "BTH_") for weight in weights)
        return nope, pe

    def _latent(self, x: Float[Array, "B T D"]) -> Float[Array, "B T CR"]:
        """[rms(c) | k_pe]: the extra key is neither normalised nor rotated."""
        C = self.config.mla.kv_lora_rank
        a = project("btd,dc->btc", x, self.kv_a, "D_", "BT_")
        c = rms_norm(a[..., :C], self.kv_a_norm[...], self.config.mla.latent_norm_eps)
        return named("mla_latent", jnp.concatenate([c, a[..., C:]], axis=-1))

    def _output(self, x: Float[Array, "B T D"], o: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        gate = jax.nn.sigmoid(project("btd,dhv->bthv", x, self.g, "DHV", "BTHV"))
        return project("bthv,hvd->btd", o * gate, self.o, "HVD", "BTD")


def _expanded(q_nope, q_pe, latent, kv_b, segment_ids, *, scale: float):
    """Causal attention within documents; every head sees the same extra key. Queries are this rank's fragments.

    Where rows are cut latents travel, 576 numbers per token, and their gradients back; every rank expands all of them.
    """
    layout, starts = layout_in_use(), [None]
    if layout:
        starts = layout.starts(q_nope.shape[1])
        # Marked before: gradients are then summed over tensor ranks after they were scattered, not for whole rows.
        latent, segment_ids = layout.whole(*vary_alike(latent, like=(q_nope,))), layout.whole(segment_ids)
    c, k_pe = jnp.split(latent, [kv_b.shape[0]], axis=2)
    groups = head_groups(kv_b.shape[1], latent.shape[0] * latent.shape[1] * kv_b.shape[2] * kv_b.dtype.itemsize)
    run = partial(_heads, starts=starts, scale=scale)
    if groups == 1:
        o, peak = run(c, k_pe, segment_ids, q_nope, q_pe, kv_b)
    else:
        # In float32, in which the groups' gradients of them add up.
        shared = (c.astype(jnp.float32), k_pe.astype(jnp.float32), segment_ids)
        parts = (jnp.stack(jnp.split(x, groups, axis)) for x, axis in ((q_nope, 2), (q_pe, 2), (kv_b, 1)))
        o, peak = jax.lax.map(lambda heads: jax.checkpoint(run)(*shared, *heads), tuple(parts))
        o, peak = jnp.concatenate(list(o), axis=2), peak.reshape(-1)
    return o, sharding.max_over("BT", peak)


def head_groups(heads: int, bytes_per_head: int) -> int:
    """So many equal groups of heads, one after the other, that a group's keys and values take no more than EXPANDED."""
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return next((n for n in divisors if heads // n * bytes_per_head <= EXPANDED), heads)


def _heads(c, k_pe, segment_ids, q_nope, q_pe, kv_b, *, starts, scale: float):
    """(o, largest logits) of some heads: keys and values from the latents c, then attention."""
    c, k_pe = c.astype(kv_b.dtype), k_pe.astype(kv_b.dtype)
    kv = jnp.einsum("bsc,chn->bshn", c, kv_b, precision=precision(c.dtype))
    fragments = zip(starts, *(jnp.split(x, len(starts), axis=1) for x in (q_nope, q_pe)), strict=True)
    runs = [mla_attention(*q, kv, k_pe, segment_ids, scale=scale, start=start) for start, *q in fragments]
    o, peak = zip(*runs, strict=True)
    return jnp.concatenate(o, axis=1), jnp.stack(peak).max(0)


def _absorbed(q, new, valid, start, latent, *, rank: int, scale: float):
    """Write the new latents behind the cached ones and attend to all of them: one key head, H queries."""
    capacity = latent.shape[1]
    position = start[:, None] + jnp.arange(q.shape[1])[None]
    slot = jnp.where(valid >= 0, position, capacity)  # out of bounds: dropped
    latent = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop"))(latent, slot, new.astype(latent.dtype))
    k_position = jnp.broadcast_to(jnp.arange(capacity)[None], latent.shape[:2])
    k_segment = jnp.zeros_like(k_position)  # positions never written lie after every query
    keys = latent.astype(q.dtype)[:, :, None]
    q_segment = jnp.where(valid >= 0, 0, -1)
    o, _ = blockwise_attention(q[:, :, None], keys, keys[..., :rank], position, k_position, q_segment, k_segment, scale)
    return o[:, :, 0], latent
