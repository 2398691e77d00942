"""Blockwise causal attention with an online softmax in float32: no [T, S] array, forward or backward.

B batch, T queries, S keys, G key heads, M query heads per key head, K key width, V value width.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 512
NEGATIVE = -1e30  # finite, so that a row without keys gives 0 and not NaN


def blockwise_attention(
    q: Float[Array, "B T G M K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G V"],
    q_position: Int[Array, "B T"],
    k_position: Int[Array, "B S"],
    q_segment: Int[Array, "B T"],
    k_segment: Int[Array, "B S"],
    scale: float,
    block: int = BLOCK,
) -> tuple[Float[Array, "B T G M V"], Float[Array, "G M"]]:
    """softmax(scale q k^T) v over keys of the same segment at or before each query; and the largest logit per head.

    Queries of a negative segment attend to nothing and give 0. The output has v's dtype, accumulated in float32.
    """
    T, S = q.shape[1], k.shape[1]
    keys = _blocks((k, v, k_position, k_segment), S, block, pad_segment=-2)
    queries = _blocks((q, q_position, q_segment), T, block, pad_segment=-1)
    attend = jax.checkpoint(partial(_attend_block, scale=scale))
    o, peak = jax.lax.map(lambda x: attend(x, keys), queries)
    return jnp.moveaxis(o, 0, 1).reshape(q.shape[0], -1, *o.shape[3:])[:, :T], peak.max(0)


def expanded_attention(
    q_nope: Float[Array, "B T H N"],
    q_pe: Float[Array, "B T H R"],
    kv: Float[Array, "B S H NV"],
    k_pe: Float[Array, "B S R"],
    segment_ids: Int[Array, "B S"] | None,
    scale: float,
    start: Int[Array, ""] | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """`blockwise_attention` of Gated MLA's expanded form: kv is [k_nope | v], all heads share k_pe. Arguments as in
    `api.mla_attention`."""
    B, S, H = kv.shape[:3]
    N = q_nope.shape[3]
    k = jnp.concatenate([kv[..., :N], jnp.broadcast_to(k_pe[:, :, None], (B, S, H, k_pe.shape[2]))], axis=-1)
    q = jnp.concatenate([q_nope, q_pe], axis=-1)[:, :, :, None]
    k_segment = jnp.zeros((B, S), jnp.int32) if segment_ids is None else segment_ids
    k_position = jnp.broadcast_to(jnp.arange(S)[None], (B, S))
    first = 0 if start is None else start
    q_position, q_segment = (
        jax.lax.dynamic_slice_in_dim(x, first, q.shape[1], axis=1) for x in (k_position, k_segment)
    )
    o, peak = blockwise_attention(q, k, kv[..., N:], q_position, k_position, q_segment, k_segment, scale)
    return o[:, :, :, 0], peak[:, 0]


def _blocks(arrays: tuple[Array, ...], length: int, block: int, pad_segment: int) -> tuple[Array, ...]:
    """Cut axis 1 into [N, B, block, ...]; the last array is the segments, padded so that nothing matches."""
    size = min(block, length)
    count = -(-length // size)
    fill = [0] * (len(arrays) - 1) + [pad_segment]

    def cut(x, value):
        pad = [(0, 0)] * x.ndim
        pad[1] = (0, count * size - length)
        x = jnp.pad(x, pad, constant_values=value)
        return jnp.moveaxis(x.reshape(x.shape[0], count, size, *x.shape[2:]), 1, 0)

    return tuple(cut(x, value) for x, value in zip(arrays, fill, strict=True))


def _attend_block(query, keys, *, scale):
    """One block of queries against all blocks of keys."""
    q, q_position, q_segment = query
    B, T, G, M, _ = q.shape
    V = keys[1].shape[-1]

    @jax.checkpoint
    def step(carry, key):
        m, total, acc = carry
        k, v, k_position, k_segment = key
        exact = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        s = jnp.einsum("btgmk,bsgk->bgmts", q, k, precision=exact, preferred_element_type=jnp.float32) * scale
        allowed = (q_segment[:, :, None] == k_segment[:, None, :]) & (q_position[:, :, None] >= k_position[:, None, :])
        allowed = allowed & (q_segment >= 0)[:, :, None]
        s = jnp.where(allowed[:, None, None], s, NEGATIVE)
        m_new = jnp.maximum(m, s.max(-1))
        p = jnp.where(allowed[:, None, None], jnp.exp(s - m_new[..., None]), 0.0)
        decay = jnp.exp(m - m_new)
        pv = jnp.einsum("bgmts,bsgv->bgmtv", p.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32)
        return (m_new, total * decay + p.sum(-1), acc * decay[..., None] + pv), None

    # Derived from q so that inside shard_map the carry varies over the same mesh axes as the data.
    zero = jnp.moveaxis(q[..., 0], 1, 3).astype(jnp.float32) * 0
    start = (zero + NEGATIVE, zero, jnp.broadcast_to(zero[..., None], (B, G, M, T, V)))
    (m, total, acc), _ = jax.lax.scan(step, start, keys)
    o = acc / jnp.where(total == 0, 1.0, total)[..., None]
    return jnp.moveaxis(o, 3, 1).astype(keys[1].dtype), jax.lax.stop_gradient(m).max((0, 3))
