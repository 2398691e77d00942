"""Decode steps of Kimi Delta Attention on a TPU core: a few tokens, the states updated where they are in HBM.

Per token and head (see `reference`), with a = exp(g):

    S = Diag(a) S        e = beta (v - S^T k)        S = S + k e^T        o = scale S^T q

Everything is float32 on the vector unit. The gradient is that of the recurrence.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.common.dispatch import vary_alike
from pallas_kernels.common.kernels import shape_of
from pallas_kernels.kda.reference import recurrent_kda
from pallas_kernels.kda.steps import segment_order

MAX_HEADS = 8
COMPILER_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=48 * 2**20)


class Tokens(NamedTuple):
    """Float32, per value head; q is scaled."""

    q: Float[Array, "B HV T K"]
    k: Float[Array, "B HV T K"]
    a: Float[Array, "B HV T K"]
    v: Float[Array, "B HV T V"]
    beta: Float[Array, "B HV T 1"]


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def recurrent_kda_pallas(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "B HV K V"] | None,
    segment_ids: Int[Array, "B T"] | None,
    scale: float,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """Arguments and results as in `reference.recurrent_kda`. A donated state is updated in place."""
    (B, T), HV, (K, V) = q.shape[:2], v.shape[2], (k.shape[3], v.shape[3])

    def heads_first(x):
        x = x.astype(jnp.float32)
        return jnp.swapaxes(jnp.repeat(x, HV // x.shape[2], axis=2), 1, 2)

    tokens = Tokens(*(heads_first(x) for x in (q * scale, k, jnp.exp(g), v, beta[..., None])))
    state = jnp.zeros((B, HV, K, V), jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)
    heads = max(n for n in range(1, MAX_HEADS + 1) if HV % n == 0)
    rows = lambda width: pl.BlockSpec((1, heads, T, width), lambda b, h, s: (b, h, 0, 0))  # noqa: E731
    of_state = pl.BlockSpec((1, heads, K, V), lambda b, h, s: (b, h, 0, 0))
    flags, state, *tokens = vary_alike(_flags(segment_ids, B, T), state, *tokens)
    o, state = pl.pallas_call(
        functools.partial(_kernel, length=T, heads=heads),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, HV // heads),
            in_specs=[*[rows(K)] * 3, rows(V), rows(1), of_state],
            out_specs=[rows(V), of_state],
        ),
        out_shape=[shape_of((B, HV, T, V), jnp.float32, state), shape_of(state.shape, jnp.float32, state)],
        input_output_aliases={1 + len(tokens): 1},
        compiler_params=COMPILER_PARAMS,
        name="kda_decode",
    )(flags, *tokens, state)
    return jnp.swapaxes(o, 1, 2).astype(v.dtype), state


def _forward(*arguments):
    return recurrent_kda_pallas(*arguments), arguments[:7]


def _backward(scale, saved, cotangents):
    *floating, segment_ids = saved

    def recurrence(q, k, v, g, beta, initial_state):
        options = {"initial_state": initial_state, "segment_ids": segment_ids}
        return recurrent_kda(q, k, v, g, beta, scale=scale, **options)

    return *jax.vjp(recurrence, *floating)[1](cotangents), None


recurrent_kda_pallas.defvjp(_forward, _backward)
LIVE, STARTS = 1, 2


def _flags(segment_ids: Int[Array, "B T"] | None, B: int, T: int) -> Int32[Array, "BT"]:
    """LIVE, and STARTS where a token starts another segment than that of the state."""
    if segment_ids is None:
        return jnp.full(B * T, LIVE, jnp.int32)
    number, live = segment_order(segment_ids)
    starts = jnp.diff(number, axis=1, prepend=number[:, :1]) != 0
    return (LIVE * live + STARTS * starts).astype(jnp.int32).reshape(-1)


def _kernel(flags, *refs, length: int, heads: int):
    """All tokens of a block of heads."""
    inputs, state_in, o, state = Tokens(*refs[:5]), *refs[5:]
    state[...] = state_in[...]
    for t in range(length):
        flag, here = flags[pl.program_id(0) * length + t], slice(t, t + 1)

        @pl.when(flag & LIVE == LIVE)
        def _(flag=flag, here=here):
            for h in range(heads):
                token = Tokens(*(ref[0, h, here] for ref in inputs))
                state[0, h], o[0, h, here] = _token(state[0, h], flag & STARTS == 0, token)

        @pl.when(flag & LIVE == 0)
        def _(here=here):
            o[0, :, here] = jnp.zeros_like(o[0, :, here])


def _column(row: Float[Array, "1 K"], V: int) -> Float[Array, "K V"]:
    """A row as a column in all lanes: a channel of a key scales a row of the state."""
    return jnp.broadcast_to(row, (V, row.shape[1])).T


def _token(S: Float[Array, "K V"], keep, token: Tokens):
    """(S, o [1, V]) after one token of one head, whose fields are rows."""
    q, k, a = (_column(row, S.shape[1]) for row in token[:3])
    S = jnp.where(keep, a * S, 0.0)
    S = S + k * (token.beta * (token.v - jnp.sum(k * S, axis=0, keepdims=True)))
    return S, jnp.sum(q * S, axis=0, keepdims=True)
