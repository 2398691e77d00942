"""A general diagonal-plus-low-rank recurrence in chunks, to measure what KDA's tied vectors save. Nothing else uses it.

    S_t = (Diag(exp(g_t)) + a_t b_t^T) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

KDA is a = -beta k, b = exp(g) k, v = beta v (Kimi Linear report section 6.2): its chunk needs the products of q and of
k with k alone, where this one needs those of q and of b with a and with k, and twice the updates of the state.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.kda.chunked import CHUNK, decay_to_end, heads_first, inverse_unit_lower, split_chunks

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
_ROW, _COLUMN = np.indices((CHUNK, CHUNK))


def chunk_dplr_as_kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    gate_lower_bound: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`chunk_kda` for g >= gate_lower_bound, from the general form's arguments."""
    scale = k.shape[-1] ** -0.5
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (q, k, v, g, beta[..., None]))
    o, state = chunk_dplr(q * scale, k, beta * v, g, -beta * k, jnp.exp(g) * k, gate_lower_bound)
    return o, state


def chunk_dplr(q, k, v, g, a, b, gate_lower_bound: float) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Arrays [B, T, H, _]; q is scaled. One state per row, zero at its start."""
    chunks = tuple(heads_first(split_chunks(x)) for x in (q, k, v, g, a, b))
    B, T, H, K = k.shape
    step = jax.checkpoint(partial(_chunk_step, gate_lower_bound=gate_lower_bound), prevent_cse=False)
    state, o = jax.lax.scan(step, jnp.zeros((B, H, K, v.shape[-1]), jnp.float32), chunks)
    return o.transpose(1, 0, 3, 2, 4).reshape(B, -1, H, v.shape[-1])[:, :T], state


def _chunk_step(state, chunk, *, gate_lower_bound: float):
    """With u_t = b_t^T S_{t-1}; rows and columns are decayed to the chunk's first row, as in `chunked`."""
    q, k, v, g, a, b = chunk
    to_row = _einsum("ij,bhjk->bhik", ((_COLUMN <= _ROW) & (_COLUMN > 0)).astype(np.float32), g)
    centre = -gate_lower_bound * (CHUNK - 1) / 2
    rise, fall = jnp.exp(to_row + centre), jnp.exp(-to_row - centre)
    before = rise * jnp.exp(-g)  # what b reads has not decayed at its own token
    pairs = partial(_einsum, "bhik,bhjk->bhij")
    from_a, from_k = a * fall, k * fall
    N, M = (jnp.where((_COLUMN < _ROW)[None, None], pairs(b * before, x), 0) for x in (from_a, from_k))
    P, Q = (jnp.where((_COLUMN <= _ROW)[None, None], pairs(q * rise, x), 0) for x in (from_a, from_k))

    from_entry, to_end = jnp.exp(to_row + g[..., :1, :]), decay_to_end(g)
    read = partial(_einsum, "bhik,bhkv->bhiv")
    mix = partial(_einsum, "bhij,bhjv->bhiv")
    u = mix(inverse_unit_lower(-N), read(b * from_entry * jnp.exp(-g), state) + mix(M, v))
    o = read(q * from_entry, state) + mix(P, u) + mix(Q, v)
    write = partial(_einsum, "bhik,bhiv->bhkv")
    return from_entry[..., -1, :, None] * state + write(a * to_end, u) + write(k * to_end, v), o
