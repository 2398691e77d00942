"""The public operation: validation and choice of implementation."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import pallas
from pallas_kernels.attention.blockwise import NEGATIVE, blockwise_attention, expanded_attention
from pallas_kernels.common.dispatch import on_tpu

__all__ = ["Implementation", "blockwise_attention", "mla_attention"]

Implementation = Literal["xla", "pallas"]


def mla_attention(
    q_nope: Float[Array, "B T H N"],
    q_pe: Float[Array, "B T H R"],
    kv: Float[Array, "B S H NV"],
    k_pe: Float[Array, "B S R"],
    segment_ids: Int[Array, "B S"] | None = None,
    *,
    scale: float,
    start: Int[Array, ""] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """Causal attention of Gated MLA in its expanded form (report §2.1.2), within segments. Per head:

        o_t = sum_s softmax_s(scale (<q_nope_t, k_nope_s> + <q_pe_t, k_pe_s>)) v_s,   s <= t of the same segment

    Arguments:
        q_nope, q_pe      the two parts of the queries. All four arrays are float32, or all bfloat16.
        kv                [k_nope | v], the expanded latents.
        k_pe              the extra part of the keys, the same for all heads.
        segment_ids       int32: tokens attend within their number. Negative is padding, whose output is 0. None: one
                          segment.
        start             the position of the first query: the T queries are a part of the row of S keys, and both
                          `start` and S are multiples of T. None: they are the whole row, S = T.
        implementation    "xla" (blocks of 512) or "pallas" (for TPU; R up to 64, and T whole lanes where there is a
                          `start`). None chooses: "pallas" where R and T allow and the mesh, or else the default
                          backend, is a TPU, "xla" elsewhere.

    Returns the outputs in kv's type, accumulated in float32, and the largest logit of every head, without gradient.
    Nothing of size T x T is made, forward or backward. Raises ValueError naming the argument.
    """
    _check(q_nope, q_pe, kv, k_pe, segment_ids, scale, start)
    if 0 in q_nope.shape:
        return kv[:, : q_nope.shape[1], :, q_nope.shape[3] :], jnp.full(q_nope.shape[2], NEGATIVE, jnp.float32)
    fits = q_pe.shape[3] <= pallas.HALF and (start is None or q_nope.shape[1] % pallas.LANES == 0)
    match implementation or ("pallas" if on_tpu() and fits else "xla"):
        case "xla":
            return expanded_attention(q_nope, q_pe, kv, k_pe, segment_ids, scale, start)
        case "pallas" if not fits:
            raise ValueError(
                f"q_pe.shape = {q_pe.shape}: expected R <= {pallas.HALF} for 'pallas', and T a multiple of "
                f"{pallas.LANES} with a start"
            )
        case "pallas":
            return pallas.mla_attention_pallas(q_nope, q_pe, kv, k_pe, segment_ids, scale=scale, start=start)
        case _:
            raise ValueError(f"implementation = {implementation!r}: expected None, 'xla' or 'pallas'")


def _check(q_nope, q_pe, kv, k_pe, segment_ids, scale, start):
    for name, x, rank in (("q_nope", q_nope, 4), ("q_pe", q_pe, 4), ("kv", kv, 4), ("k_pe", k_pe, 3)):
        if x.ndim != rank:
            raise ValueError(f"{name}.shape = {x.shape}: expected {rank} dimensions")
        if x.dtype != kv.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(
                f"{name}.dtype = {x.dtype}: expected float32 or bfloat16, and the same as kv's, {kv.dtype}"
            )
    B, T, H, N = q_nope.shape
    S, R = k_pe.shape[1:]
    shapes = ("q_pe", q_pe, (B, T, H, R)), ("k_pe", k_pe, (B, S, R)), ("kv", kv, (B, S, H, kv.shape[3]))
    for name, x, expected in shapes:
        if x.shape != expected:
            raise ValueError(f"{name}.shape = {x.shape}: expected {expected} for q_nope {q_nope.shape}")
    if (S != T) if start is None else (T and S % T):
        raise ValueError(f"k_pe.shape = {k_pe.shape}: expected {T} keys, or with a start a multiple of them")
    if kv.shape[3] <= N:
        raise ValueError(
            f"kv.shape = {kv.shape}: expected more than {N} channels, the keys', for q_nope {q_nope.shape}"
        )
    if not scale > 0:
        raise ValueError(f"scale = {scale}: expected a positive number")
    if segment_ids is None:
        return
    if segment_ids.shape != (B, S):
        raise ValueError(f"segment_ids.shape = {segment_ids.shape}: expected {(B, S)} for k_pe {k_pe.shape}")
    if segment_ids.dtype != jnp.int32:
        raise ValueError(f"segment_ids.dtype = {segment_ids.dtype}: expected int32")
