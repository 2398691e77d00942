"""Kimi Delta Attention in chunks of 16 tokens, in plain XLA: the form for every backend without a Pallas kernel.

Inside a chunk with entry state S, let D_ij = exp(sum of g over j < m <= i) per key channel. The recurrence unrolls to

    L_ij = beta_i <k_i, D_ij k_j>  (i > j)          P_ij = scale <q_i, D_ij k_j>  (i >= j)
    (I + L) U = beta (v - K+ S)                     o = Q+ S + P U                S' = Diag(decay) S + K-^T U

where K+ and Q+ are decayed from the chunk's entry and K- to its end (Kimi Linear report section 3.2, without its WY
pair). The rows of U are the corrections that the recurrence writes.

Why 16 and not 64: 16 rows are one tile, over which the bounded gate lets D be factored into rows and columns; there are
no blocks to assemble, no inverses to combine, and fewer operations per token, 6 K^2 + 8 C K. On two busy CPU cores at
B = 16, T = 256, H = 4, K = V = 32 forward and backward take 41 ms of processor time against 71 ms for chunks of 64 with
16-row tiles, and compile in a third of the time. The price is a state saved every 16 tokens for the backward pass.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.common.dispatch import vary_alike
from pallas_kernels.kda.gate import GATE_FLOOR
from pallas_kernels.kda.reference import token_owner
from pallas_kernels.kda.steps import segment_order

CHUNK = 16

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
_ROW, _COLUMN = np.indices((CHUNK, CHUNK))
_EARLIER, _EARLIER_OR_SELF = _COLUMN < _ROW, _COLUMN <= _ROW


class Chunks(NamedTuple):
    """The inputs of a run of chunks, [N, ...] stacked for the scan; one chunk of it inside the scan body.

    `segment` numbers the segments in order; `entry` is the number of the segment that the entry state belongs to. Both
    are None where every token belongs to one segment.
    """

    q: Float[Array, "*N B H C K"]
    k: Float[Array, "*N B H C K"]
    v: Float[Array, "*N B HV C V"]
    g: Float[Array, "*N B HV C K"]
    beta: Float[Array, "*N B HV C"]
    segment: Int[Array, "*N B C"] | None = None
    entry: Int[Array, "*N B"] | None = None


def chunk_kda_xla(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float,
    initial_state: Float[Array, "B HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    gate_lower_bound: float | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Rows of tokens, each one or more segments; arguments and results as in `api.chunk_kda`."""
    length = q.shape[1]
    inputs = (q, k, v, g, beta)
    segment = entry = None
    if segment_ids is not None:
        valid = segment_ids >= 0
        inputs = tuple(_zero_padding(x, valid) for x in inputs)
        segment = split_chunks(segment_order(_pad(segment_ids, -1))[0])
        entry = jnp.concatenate([jnp.zeros_like(segment[:1, :, 0]), segment[:-1, :, -1]])
    chunks = Chunks(*(heads_first(split_chunks(x)) for x in inputs), segment, entry)
    state = _zero_state(chunks) if initial_state is None else initial_state.astype(jnp.float32)
    (state,) = vary_alike(state, like=tuple(jax.tree.leaves(chunks)))

    step = partial(_chunk_step, scale=scale, gate_lower_bound=gate_lower_bound)
    state, o = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), state, chunks)
    o = o.transpose(1, 0, 3, 2, 4)
    o = o.reshape(o.shape[0], -1, *o.shape[3:])[:, :length]
    return (o if segment_ids is None else _zero_padding(o, valid)).astype(v.dtype), state


def chunk_kda_packed_xla(
    q: Float[Array, "1 T H K"],
    k: Float[Array, "1 T H K"],
    v: Float[Array, "1 T HV V"],
    g: Float[Array, "1 T HV K"],
    beta: Float[Array, "1 T HV"],
    *,
    scale: float,
    segment_offsets: Int[Array, "N1"],
    initial_state: Float[Array, "N HV K V"] | None = None,
    gate_lower_bound: float | None = None,
) -> tuple[Float[Array, "1 T HV V"], Float[Array, "N HV K V"]]:
    """N segments laid end to end, each with a state of its own; arguments and results as in `api.chunk_kda`.

    Chunks restart with each segment, at most T / 16 + N of them, since every segment may bring a state along.
    """
    plan = _plan_segments(segment_offsets, q.shape[1])

    def gather(x):
        x = jnp.where(plan.valid.reshape(*plan.valid.shape, *(1,) * (x.ndim - 2)), x[0][plan.token], 0)
        return heads_first(x[:, None])

    chunks = Chunks(*(gather(x) for x in (q, k, v, g, beta)))
    zero = _zero_state(chunks)[0]
    segments = segment_offsets.shape[0] - 1
    initial = jnp.broadcast_to(zero[None], (segments, *zero.shape)) if initial_state is None else initial_state
    initial = initial.astype(jnp.float32)

    def step(state, inputs):
        chunk, first, entry = inputs
        state, o = _chunk_step(
            jnp.where(first, entry[None], state), chunk, scale=scale, gate_lower_bound=gate_lower_bound
        )
        return state, (o[0], state[0])

    xs = (chunks, plan.first, initial[plan.segment])
    (zero,) = vary_alike(zero[None], like=tuple(jax.tree.leaves(xs)))
    _, (o, states) = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), zero, xs)
    final = jnp.where(plan.empty[:, None, None, None], initial, states[plan.last])
    owner, held = token_owner(segment_offsets, q.shape[1])
    o = o[plan.chunk, :, plan.row]
    return _zero_padding(o[None], held[None]).astype(v.dtype), final


def _chunk_step(
    state: Float[Array, "B HV K V"], chunk: Chunks, *, scale: float, gate_lower_bound: float | None
) -> tuple[Float[Array, "B HV K V"], Float[Array, "B HV C V"]]:
    """One chunk: the state after it and its outputs."""
    group = chunk.v.shape[1] // chunk.k.shape[1]
    q, k, v, g, beta = (x.astype(jnp.float32) for x in (chunk.q, chunk.k, chunk.v, chunk.g, chunk.beta))
    q, k = (jnp.repeat(x, group, axis=1) if group > 1 else x for x in (q, k))  # gradients add up in float32
    q = q * scale

    if gate_lower_bound is None:
        P, L, from_entry, to_end = _products_any(q, k, jnp.where(g < GATE_FLOOR, GATE_FLOOR, g))
    else:
        P, L, from_entry, to_end = _products_bounded(q, k, g, gate_lower_bound)
    P = jnp.where(_EARLIER_OR_SELF[None, None], P, 0)
    L = jnp.where(_EARLIER[None, None], beta[..., None] * L, 0)
    decay = from_entry[..., -1, :]
    if chunk.segment is not None:
        last = chunk.segment[:, -1]
        same = chunk.segment[:, None, :, None] == chunk.segment[:, None, None, :]
        P, L = jnp.where(same, P, 0), jnp.where(same, L, 0)
        from_entry = jnp.where((chunk.segment == chunk.entry[:, None])[:, None, :, None], from_entry, 0)
        to_end = jnp.where((chunk.segment == last[:, None])[:, None, :, None], to_end, 0)
        decay = jnp.where((last == chunk.entry)[:, None, None], decay, 0)

    error = v - _einsum("bhik,bhkv->bhiv", k * from_entry, state)
    U = _einsum("bhij,bhjv->bhiv", inverse_unit_lower(L), beta[..., None] * error)
    o = _einsum("bhik,bhkv->bhiv", q * from_entry, state) + _einsum("bhij,bhjv->bhiv", P, U)
    return decay[..., None] * state + _einsum("bhik,bhiv->bhkv", k * to_end, U), o


def _products_bounded(q, k, g, gate_lower_bound):
    """<q_i, D_ij k_j> and <k_i, D_ij k_j> where g >= gate_lower_bound: one product each, every row decayed to row 0.

    Row factors reach e^-75 and column factors e^75 at a bound of -5. A power of two moves both to either side of 1
    without rounding anything, and each exponential is the square of its root: otherwise bounds near -5.9 would meet the
    end of float32's range, and gradients as small as those of a mean over many tokens would vanish against e^-75. What
    the factors make of the pairs i < j may overflow, and is dropped by selection.

    Returns the products and the decay from the chunk's entry to each row and from each row to the chunk's end.
    """
    to_row = _einsum("ij,bhjk->bhik", (_EARLIER_OR_SELF & (_COLUMN > 0)).astype(np.float32), g)
    centre = 2.0 ** round(-gate_lower_bound * (CHUNK - 1) / 2 / np.log(2))
    root, inverse_root = jnp.exp(0.5 * to_row), jnp.exp(-0.5 * to_row)
    rows, columns = root * (root * centre), k * (inverse_root * (inverse_root / centre))
    P = _einsum("bhik,bhjk->bhij", q * rows, columns)
    L = _einsum("bhik,bhjk->bhij", k * rows, columns)
    return P, L, jnp.exp(to_row + g[..., :1, :]), decay_to_end(g)


def _products_any(q, k, g):
    """The same for any g <= 0, by recursive halving into blocks of 8, 4, 2 and 1 rows: every exponent is <= 0.

    At each level the rows of a block's second half and the columns of its first half are decayed to the boundary
    between them; their product is kept for the pairs of rows that this level separates.
    """
    P = jnp.where((_ROW == _COLUMN)[None, None], _einsum("bhik,bhjk->bhij", q, k), 0)
    L = jnp.zeros_like(P)
    for size in (1, 2, 4, 8):
        second, block = _ROW // size % 2 == 1, _ROW // size == _COLUMN // size
        run = np.where(second, block & _EARLIER_OR_SELF, block & (_COLUMN > _ROW))
        factor = jnp.exp(_einsum("ij,bhjk->bhik", run.astype(np.float32), g))
        columns = k * factor
        here = (second & (_ROW // size == _COLUMN // size + 1))[None, None]
        P = jnp.where(here, _einsum("bhik,bhjk->bhij", q * factor, columns), P)
        L = jnp.where(here, _einsum("bhik,bhjk->bhij", columns, columns), L)
    from_entry = jnp.exp(_einsum("ij,bhjk->bhik", _EARLIER_OR_SELF.astype(np.float32), g))
    return P, L, from_entry, decay_to_end(g)


def decay_to_end(g):
    """Summed forward from each row, not as a difference of two sums from the start, which would lose bits."""
    return jnp.exp(_einsum("ij,bhjk->bhik", (_COLUMN > _ROW).astype(np.float32), g))


@jax.custom_jvp
def inverse_unit_lower(L: Float[Array, "B HV C C"]) -> Float[Array, "B HV C C"]:
    """(I + L)^{-1} of strictly lower matrices by forward substitution: column j eliminates row j from the rows below.

    Never by powers of L (a Neumann series): those grow like |L|^n while the inverse stays of order one, and the keys of
    a trained model are correlated enough to lose every digit.
    """

    def eliminate(j, A):
        column = jax.lax.dynamic_index_in_dim(L, j, axis=-1)
        return A - column * jax.lax.dynamic_index_in_dim(A, j, axis=-2)

    identity = jnp.zeros_like(L) + jnp.eye(CHUNK, dtype=L.dtype)[None, None]
    return jax.lax.fori_loop(0, CHUNK - 1, eliminate, identity)


@inverse_unit_lower.defjvp
def _inverse_unit_lower_jvp(primals, tangents):
    """dA = -A dL A; differentiating the loop instead would save every step of it."""
    A = inverse_unit_lower(*primals)
    return A, -_einsum("bhij,bhjk->bhik", _einsum("bhij,bhjk->bhik", A, *tangents), A)


class _SegmentPlan(NamedTuple):
    """Where T tokens of N segments stand in M chunks that restart with each segment."""

    segment: Int[Array, "M"]
    first: Bool[Array, "M"]
    token: Int[Array, "M C"]
    valid: Bool[Array, "M C"]
    chunk: Int[Array, "T"]
    row: Int[Array, "T"]
    last: Int[Array, "N"]
    empty: Bool[Array, "N"]


def _plan_segments(segment_offsets: Int[Array, "N1"], length: int) -> _SegmentPlan:
    """The plan; M is static: every chunk that can be needed, those left over being all padding."""
    segments = segment_offsets.shape[0] - 1
    starts, lengths = segment_offsets[:-1], jnp.diff(segment_offsets)
    ends = jnp.cumsum(-(-lengths // CHUNK))
    begins = ends - -(-lengths // CHUNK)
    index = jnp.arange(length // CHUNK + segments, dtype=jnp.int32)
    segment = jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
    used, segment = segment < segments, jnp.minimum(segment, segments - 1)

    within = (index - begins[segment])[:, None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)[None, :]
    owner, _ = token_owner(segment_offsets, length)
    position = jnp.arange(length, dtype=jnp.int32) - starts[owner]
    return _SegmentPlan(
        segment=segment,
        first=index == begins[segment],
        token=jnp.clip(starts[segment][:, None] + within, 0, length - 1),
        valid=used[:, None] & (within < lengths[segment][:, None]),
        chunk=jnp.clip(begins[owner] + position // CHUNK, 0, index.shape[0] - 1),
        row=position % CHUNK,
        last=jnp.maximum(ends - 1, 0),
        empty=lengths == 0,
    )


def _zero_padding(x: Float[Array, "B T ..."], valid: Bool[Array, "B T"]) -> Float[Array, "B T ..."]:
    """Zeros where not valid. By selection: padding may hold NaN, and 0 * NaN would reach values and gradients."""
    return jnp.where(valid.reshape(*valid.shape, *(1,) * (x.ndim - 2)), x, 0)


def _pad(x, value):
    """[B, T, ...] with T filled up to a multiple of C."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % CHUNK)] + [(0, 0)] * (x.ndim - 2), constant_values=value)


def split_chunks(x):
    """[B, T, ...] to [N, B, C, ...]; the tail is filled with zeros: tokens that leave the state as it is."""
    x = _pad(x, 0)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 1, 0)


def heads_first(x):
    """[N, B, C, H, ...] to [N, B, H, C, ...]."""
    return jnp.swapaxes(x, 2, 3)


def _zero_state(chunks: Chunks) -> Float[Array, "B HV K V"]:
    """Zeros that are sharded as the inputs are."""
    g, v = chunks.g[0, :, :, 0].astype(jnp.float32), chunks.v[0, :, :, 0].astype(jnp.float32)
    return jnp.zeros_like(g[..., None] * v[..., None, :])
