"""Kimi Delta Attention, one token at a time: the definition that every other form is tested against.

Per value head, with S in R^{K x V} and a = exp(g) (Kimi Linear report Eq. 1, K3 report section 2):

    S_t = (I - beta_t k_t k_t^T) Diag(a_t) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Everything is computed in float32, or in float64 where an input is float64 (an oracle with jax_enable_x64).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.dispatch import vary_alike

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def delta_step(
    S: Float[Array, "B HV K V"],
    q: Float[Array, "B HV K"],
    k: Float[Array, "B HV K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV K"],
    beta: Float[Array, "B HV"],
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV V"]]:
    """One token: decay, read the prediction for k, write the correction, read for (the already scaled) q."""
    S = jnp.exp(g)[..., None] * S
    error = v - _einsum("bhkv,bhk->bhv", S, k)
    S = S + k[..., None] * (beta[..., None] * error)[..., None, :]
    return S, _einsum("bhkv,bhk->bhv", S, q)


def recurrent_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """The recurrence over the tokens of each row; arguments and results as in `api.chunk_kda`."""
    batch, length = beta.shape[:2]
    if segment_ids is None:
        segment_ids = jnp.zeros_like(beta[..., 0], dtype=jnp.int32)
    valid = segment_ids >= 0
    tokens = _tokens(q, k, v, g, beta, scale, valid)
    state = _zero_state(tokens) if initial_state is None else initial_state.astype(tokens[0].dtype)
    if length == 0:
        return v, state

    def step(carry, inputs):
        S, previous, started = carry
        token, segment, is_valid = inputs
        restart = is_valid & started & (segment != previous)
        S = jnp.where(restart[:, None, None, None], 0, S)
        S_next, o = delta_step(S, *token)
        S = jnp.where(is_valid[:, None, None, None], S_next, S)
        carry = S, jnp.where(is_valid, segment, previous), started | is_valid
        return carry, jnp.where(is_valid[:, None, None], o, 0)

    ids, flags = jnp.moveaxis(segment_ids, 1, 0), jnp.moveaxis(valid, 1, 0)
    carry = vary_alike(state, jnp.zeros_like(ids[0]), jnp.zeros_like(flags[0]), like=(*tokens, ids))
    (state, _, _), o = jax.lax.scan(step, carry, (tokens, ids, flags))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), state


def recurrent_kda_packed(
    q: Float[Array, "1 T H K"],
    k: Float[Array, "1 T H K"],
    v: Float[Array, "1 T HV V"],
    g: Float[Array, "1 T HV K"],
    beta: Float[Array, "1 T HV"],
    *,
    scale: float,
    segment_offsets: Int[Array, "N1"],
    initial_state: Float[Array, "N HV K V"] | None = None,
) -> tuple[Float[Array, "1 T HV V"], Float[Array, "N HV K V"]]:
    """The recurrence over N segments laid end to end; each token reads and writes the state of its own segment."""
    segments = segment_offsets.shape[0] - 1
    owner, valid = token_owner(segment_offsets, q.shape[1])
    tokens = _tokens(q, k, v, g, beta, scale, valid[None])
    if initial_state is None:
        zero = _zero_state(tokens)
        states = jnp.broadcast_to(zero, (segments, *zero.shape[1:]))
    else:
        states = initial_state.astype(tokens[0].dtype)
    if q.shape[1] == 0:
        return v, states

    def step(states, inputs):
        token, n, is_valid = inputs
        S, o = delta_step(states[n][None], *token)
        states = states.at[n].set(jnp.where(is_valid, S[0], states[n]))
        return states, jnp.where(is_valid, o, 0)

    (states,) = vary_alike(states, like=(*tokens, owner))
    states, o = jax.lax.scan(step, states, (tokens, owner, valid))
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), states


def kda_combine(
    later: tuple[Float[Array, "*B K K"], Float[Array, "*B K V"]],
    earlier: tuple[Float[Array, "*B K K"], Float[Array, "*B K V"]],
) -> tuple[Float[Array, "*B K K"], Float[Array, "*B K V"]]:
    """Compose two runs of tokens, each acting on the state as S -> M S + N (K3 report section 5.1.2).

    `later` follows `earlier` in the sequence; the identity is (I, 0). Associative, so ranks may fold in any grouping.
    """
    (M2, S2), (M1, S1) = later, earlier
    return _einsum("...ij,...jk->...ik", M2, M1), _einsum("...ij,...jv->...iv", M2, S1) + S2


def token_owner(segment_offsets: Int[Array, "N1"], length: int) -> tuple[Int[Array, "T"], Bool[Array, "T"]]:
    """The segment that holds each token, and whether any does (tokens outside the offsets are padding)."""
    segments = segment_offsets.shape[0] - 1
    position = jnp.arange(length, dtype=segment_offsets.dtype)
    # A token's segment is the last one that starts at or before it: empty segments before it start there too.
    owner = jnp.sum(position[:, None] >= segment_offsets[None, 1:], axis=1, dtype=jnp.int32)
    valid = (position >= segment_offsets[0]) & (position < segment_offsets[-1])
    return jnp.clip(owner, 0, max(segments - 1, 0)), valid


def _tokens(q, k, v, g, beta, scale, valid):
    """Time-major inputs at full precision, key heads repeated to value heads, padding replaced by zeros."""
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in (q, k, v, g, beta)) else jnp.float32
    group = v.shape[2] // k.shape[2]

    def prepare(x):
        mask = valid.reshape(*valid.shape, *(1,) * (x.ndim - 2))
        return jnp.moveaxis(jnp.where(mask, x.astype(dtype), 0), 1, 0)

    q, k = (jnp.repeat(prepare(x), group, axis=2) for x in (q, k))
    return q * scale, k, prepare(v), prepare(g), prepare(beta)


def _zero_state(tokens):
    """[B, HV, K, V] zeros with the sharding of the inputs."""
    k, v = tokens[1], tokens[2]
    if k.shape[0] == 0:
        return jnp.zeros((*k.shape[1:], v.shape[-1]), k.dtype)
    return jnp.zeros_like(k[0][..., None] * v[0][..., None, :])
