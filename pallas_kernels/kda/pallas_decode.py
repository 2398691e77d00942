"""Decode steps of Kimi Delta Attention on a TPU core: a few tokens, the states updated where they are in HBM.

Per token and head (see `reference`), with a = exp(g):

    S = Diag(a) S        e = beta (v - S^T k)        S = S + k e^T        o = scale S^T q

Everything is float32 on the vector unit: a state of 128 x 128 crosses HBM twice, which takes as long as the arithmetic.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.common.dispatch import vary_alike
from pallas_kernels.kda.blocks import shape_of
from pallas_kernels.kda.steps import segment_order

SUBLANES = 8
COMPILER_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=48 * 2**20)


class Tokens(NamedTuple):
    """Float32, per value head; q is scaled."""

    q: Float[Array, "B T HV K"]
    k: Float[Array, "B T HV K"]
    a: Float[Array, "B T HV K"]
    v: Float[Array, "B T HV V"]
    beta: Float[Array, "B T HV 1"]


def recurrent_kda_pallas(
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
    """Arguments and results as in `reference.recurrent_kda`. Without gradients. A donated state is updated in place."""
    (B, T), HV, (K, V) = q.shape[:2], v.shape[2], (k.shape[3], v.shape[3])
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731
    of_value_heads = lambda x: jnp.repeat(wide(x), HV // x.shape[2], axis=2)  # noqa: E731
    tokens = Tokens(of_value_heads(q) * scale, of_value_heads(k), jnp.exp(wide(g)), wide(v), wide(beta)[..., None])
    state = jnp.zeros((B, HV, K, V), jnp.float32) if initial_state is None else wide(initial_state)
    heads = SUBLANES if HV % SUBLANES == 0 else HV
    row = lambda width: pl.BlockSpec((1, T, heads, width), lambda b, h, s: (b, 0, h, 0))  # noqa: E731
    of_state = pl.BlockSpec((1, heads, K, V), lambda b, h, s: (b, h, 0, 0))
    flags, state, *tokens = vary_alike(_flags(segment_ids, B, T), state, *tokens)
    tokens = Tokens(*tokens)
    o, state = pl.pallas_call(
        functools.partial(_kernel, tokens=T, heads=heads),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, HV // heads),
            in_specs=[*[row(K)] * 3, row(V), row(1), of_state],
            out_specs=[row(V), of_state],
        ),
        out_shape=[shape_of(x.shape, jnp.float32, state) for x in (tokens.v, state)],
        input_output_aliases={1 + len(tokens): 1},
        compiler_params=COMPILER_PARAMS,
        name="kda_decode",
    )(flags, *tokens, state)  # fmt: skip
    return o.astype(v.dtype), state


def _flags(segment_ids: Int[Array, "B T"] | None, B: int, T: int) -> Int32[Array, "B2 T"]:
    """Rows 2 b and 2 b + 1: is a token of row b live, and does it start another segment than that of the state."""
    if segment_ids is None:
        return jnp.tile(jnp.array([[1], [0]], jnp.int32), (B, T))
    number, live = segment_order(segment_ids)
    starts = jnp.diff(number, axis=1, prepend=number[:, :1]) != 0
    return jnp.stack([live, starts], axis=1).astype(jnp.int32).reshape(2 * B, T)


def _kernel(flags, *refs, tokens: int, heads: int):
    """All tokens of a block of heads."""
    inputs, state_in, o, state = Tokens(*refs[:5]), *refs[5:]
    b = pl.program_id(0)
    state[...] = state_in[...]
    for t in range(tokens):

        @pl.when(flags[2 * b, t] == 1)
        def _(t=t):
            keep = flags[2 * b + 1, t] == 0
            for h in range(heads):
                token = Tokens(*(ref[0, t, h : h + 1] for ref in inputs))
                state[0, h], o[0, t, h : h + 1] = _token(state[0, h], keep, token)

        @pl.when(flags[2 * b, t] == 0)
        def _(t=t):
            o[0, t] = jnp.zeros_like(o[0, t])


def _column(row: Float[Array, "1 K"], V: int) -> Float[Array, "K V"]:
    """A row as a column in all lanes: a channel of a key scales a row of the state."""
    return jnp.broadcast_to(row, (V, row.shape[1])).T


def _token(S: Float[Array, "K V"], keep, token: Tokens):
    """(S, o [1, V]) after one token of one head, whose fields are rows."""
    q, k, a = (_column(row, S.shape[1]) for row in token[:3])
    S = jnp.where(keep, a * S, 0.0)
    S = S + k * (token.beta * (token.v - jnp.sum(k * S, axis=0, keepdims=True)))
    return S, jnp.sum(q * S, axis=0, keepdims=True)
