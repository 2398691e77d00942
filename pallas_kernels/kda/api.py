"""The public operation: validation and choice of implementation."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.dispatch import on_tpu
from pallas_kernels.kda import chunked, pallas, pallas_decode, reference
from pallas_kernels.kda.gate import activate, check_gate
from pallas_kernels.kda.reference import kda_combine

__all__ = ["Implementation", "chunk_kda", "kda_combine", "kda_from_raw_gate", "recurrent_kda"]

Implementation = Literal["reference", "xla", "pallas"]
# 15 steps of the gate separate the ends of a 16-row tile, and e^88.7 is the end of float32's (and bfloat16's) range.
LOWEST_GATE_BOUND = -5.9
# Tokens of one call of the decode kernel, whose program is written out for each.
MOST_DECODED = 16
# Two lane tiles: the largest head for which a step's blocks fit VMEM.
LARGEST_HEAD = 256


def chunk_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "S HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_offsets: Int[Array, "N1"] | None = None,
    gate_lower_bound: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """Kimi Delta Attention over whole sequences (K3 report section 2; Kimi Linear report Eq. 1). Per value head:

        S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

    Arguments:
        q, k              queries and keys, already L2-normalised. Value head h reads key head h // (HV // H).
        v                 values.
        g                 log-decay (natural logarithm, <= 0), float32: the result of `kda_gate`.
        beta              write strength after its sigmoid, in (0, 1), or up to 2 where negative eigenvalues are wanted.
        scale             of the output; K ** -0.5 by default.
        initial_state     S = B: seeds the first segment of each row (zeros by default). With segment_offsets S = N: one
                          state for each segment.
        segment_ids       [B, T] int32. A change resets the state to zero. Negative is padding: output and gradients are
                          0 and the state passes through untouched, even where the inputs are NaN.
        segment_offsets   [N + 1] int32, ascending, instead of segment_ids and for B = 1: segment n holds the tokens
                          segment_offsets[n] to segment_offsets[n + 1] - 1, possibly none. Other tokens are padding.
        gate_lower_bound  None is safe for any g <= 0 (a step's decay below e^-30 counts as e^-30, with no gradient). A
                          float in [-5.9, 0) promises g >= it and selects a faster form; where the promise is broken
                          results may be infinite or NaN.
        implementation    "reference" (token by token), "xla" (chunks of 16) or "pallas" (chunks of 64, for TPU; K and V
                          up to 256; bfloat16 products where q, k and v are). None chooses: "pallas" where the mesh, or
                          else the default backend, is a TPU, "xla" elsewhere. A named one never falls back to another.

    Returns the outputs in v's type, and in float32 the state after each row's last segment, or after every segment with
    segment_offsets. Raises ValueError naming the argument, its value and what was expected.
    """
    arguments = q, k, v, g, beta
    return _run(arguments, None, scale, initial_state, segment_ids, segment_offsets, gate_lower_bound, implementation)


def kda_from_raw_gate(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    z: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    A_log: Float[Array, "HV"],
    dt_bias: Float[Array, "HV K"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "S HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_offsets: Int[Array, "N1"] | None = None,
    gate_lower_bound: float | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """`chunk_kda` with g = kda_gate(z, A_log, dt_bias, gate_lower_bound).

    The Pallas kernels apply the gate themselves: g, float32 and as large as two of the other inputs, never is in HBM.
    """
    if gate_lower_bound is not None:
        _check_bound(gate_lower_bound)
    check_gate(z, A_log, dt_bias, gate_lower_bound)
    arguments = q, k, v, z, beta
    gate = jnp.exp(A_log.astype(jnp.float32)), dt_bias.astype(jnp.float32)
    return _run(arguments, gate, scale, initial_state, segment_ids, segment_offsets, gate_lower_bound, implementation)


def _run(arguments, gate, scale, initial_state, segment_ids, segment_offsets, gate_lower_bound, implementation):
    """`gate`: rate and bias where the fourth argument are logits."""
    q, k, v, g, beta = arguments
    _check_tokens(q, k, v, g, beta)
    _check_segments(q, segment_ids, segment_offsets)
    _check_state(initial_state, k, v, segment_offsets)
    if gate_lower_bound is not None:
        _check_bound(gate_lower_bound)
    if q.shape[1] == 0:
        return v, _initial(initial_state, k, v, segment_offsets)
    options = {"scale": k.shape[-1] ** -0.5 if scale is None else scale, "initial_state": initial_state}
    implementation = implementation or ("pallas" if on_tpu() else "xla")
    if gate is not None and implementation != "pallas":
        g = activate(g.astype(jnp.float32), gate[0][None, None, :, None], gate[1][None, None], gate_lower_bound)

    match implementation:
        case "reference" if segment_offsets is not None:
            return reference.recurrent_kda_packed(q, k, v, g, beta, segment_offsets=segment_offsets, **options)
        case "reference":
            return reference.recurrent_kda(q, k, v, g, beta, segment_ids=segment_ids, **options)
        case "xla" if segment_offsets is not None:
            options |= {"gate_lower_bound": gate_lower_bound, "segment_offsets": segment_offsets}
            return chunked.chunk_kda_packed_xla(q, k, v, g, beta, **options)
        case "xla":
            options |= {"gate_lower_bound": gate_lower_bound, "segment_ids": segment_ids}
            return chunked.chunk_kda_xla(q, k, v, g, beta, **options)
        case "pallas":
            if max(k.shape[-1], v.shape[-1]) > LARGEST_HEAD:
                raise ValueError(
                    f"k.shape = {k.shape}, v.shape = {v.shape}: expected K, V <= {LARGEST_HEAD} for 'pallas'"
                )
            options |= {"gate_lower_bound": gate_lower_bound, "segment_ids": segment_ids, "rates": gate}
            return pallas.chunk_kda_pallas(q, k, v, g, beta, segment_offsets=segment_offsets, **options)
        case _:
            raise ValueError(f"implementation = {implementation!r}: expected None, 'reference', 'xla' or 'pallas'")


def _check_bound(bound):
    if not LOWEST_GATE_BOUND <= bound < 0:
        raise ValueError(f"gate_lower_bound = {bound}: expected {LOWEST_GATE_BOUND} <= bound < 0, or None")


def recurrent_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """One or a few decode steps with a state: `chunk_kda` token by token, for small T, whose steps are serial.

    "pallas" updates a donated state in place; it is the default for up to 16 tokens where the mesh, or else the default
    backend, is a TPU. "reference" is the default elsewhere.
    """
    _check_tokens(q, k, v, g, beta)
    _check_segments(q, segment_ids, None)
    _check_state(initial_state, k, v, None)
    options = {"scale": k.shape[-1] ** -0.5 if scale is None else scale}
    options |= {"initial_state": initial_state, "segment_ids": segment_ids}
    few = 0 < q.shape[1] <= MOST_DECODED and q.shape[0] > 0
    match implementation or ("pallas" if on_tpu() and few else "reference"):
        case "reference":
            return reference.recurrent_kda(q, k, v, g, beta, **options)
        case "pallas" if not few or max(k.shape[3], v.shape[3]) > LARGEST_HEAD:
            raise ValueError(
                f"k.shape = {k.shape}, v.shape = {v.shape}: expected 1 to {MOST_DECODED} tokens and "
                f"K, V <= {LARGEST_HEAD} for 'pallas'"
            )
        case "pallas":
            return pallas_decode.recurrent_kda_pallas(q, k, v, g, beta, initial_state, segment_ids, options["scale"])
        case _:
            raise ValueError(f"implementation = {implementation!r}: expected None, 'reference' or 'pallas'")


def _check_tokens(q, k, v, g, beta):
    for name, x, rank in (("q", q, 4), ("k", k, 4), ("v", v, 4), ("g", g, 4), ("beta", beta, 3)):
        if x.ndim != rank:
            raise ValueError(f"{name}.shape = {x.shape}: expected {rank} dimensions")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}.dtype = {x.dtype}: expected a floating type")
    batch, length, heads, channels = k.shape
    value_heads = v.shape[2]
    if heads == 0 or value_heads % heads:
        raise ValueError(f"v.shape = {v.shape}: expected a number of heads (axis 2) that k's {heads} divides")
    _check_shape("q", q, k.shape, "as k")
    _check_shape("v", v, (batch, length, value_heads, v.shape[3]), f"[B, T, HV, V] for k {k.shape}")
    _check_shape("g", g, (batch, length, value_heads, channels), f"[B, T, HV, K] for k {k.shape}, v {v.shape}")
    _check_shape("beta", beta, (batch, length, value_heads), f"[B, T, HV] for v {v.shape}")


def _check_segments(q, segment_ids, segment_offsets):
    if segment_ids is not None and segment_offsets is not None:
        raise ValueError("segment_offsets: expected None where segment_ids is given")
    for name, x in (("segment_ids", segment_ids), ("segment_offsets", segment_offsets)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.signedinteger):
            raise ValueError(f"{name}.dtype = {x.dtype}: expected int32")
    if segment_ids is not None:
        _check_shape("segment_ids", segment_ids, q.shape[:2], "[B, T]")
    if segment_offsets is not None and (segment_offsets.ndim != 1 or segment_offsets.shape[0] < 2):
        raise ValueError(f"segment_offsets.shape = {segment_offsets.shape}: expected [N + 1] for N >= 1 segments")
    if segment_offsets is not None and q.shape[0] != 1:
        raise ValueError(f"q.shape = {q.shape}: expected a batch of 1 with segment_offsets")


def _initial(initial_state, k, v, segment_offsets):
    """The state before any token, for sequences that have none."""
    if initial_state is not None:
        return initial_state.astype(jnp.float32)
    states = k.shape[0] if segment_offsets is None else segment_offsets.shape[0] - 1
    return jnp.zeros((states, v.shape[2], k.shape[3], v.shape[3]), jnp.float32)


def _check_state(initial_state, k, v, segment_offsets):
    if initial_state is None:
        return
    states, meaning = (k.shape[0], "B") if segment_offsets is None else (segment_offsets.shape[0] - 1, "N")
    expected = (states, v.shape[2], k.shape[3], v.shape[3])
    _check_shape("initial_state", initial_state, expected, f"[{meaning}, HV, K, V]")


def _check_shape(name, x, expected, meaning):
    if x.shape != tuple(expected):
        raise ValueError(f"{name}.shape = {x.shape}: expected {tuple(expected)} ({meaning})")
