"""Kimi Delta Attention forward on a TPU core: chunks of 64 rows, several heads at once, the state in VMEM.

A grid step works on one chunk (one of `Steps`) of a block of value heads. Inputs are read in the layout in which a
projection leaves them, [B, T, heads * channels], so nothing is transposed in HBM. The state stays in VMEM from chunk to
chunk, transposed [V, K], so that its decay is one row vector.

What decides the speed is how well the scheduler packs instructions: one head is a chain of dependent products. The
heads are therefore written in turns (`in_turns`), in two passes: `_intra` needs no state and fills the vector unit,
`_inter` is the chain through the state.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.common.kernels import COLUMNS_BY_ROWS, LANES, ROWS_BY_ROWS, cost_of, dot, in_turns, shape_of
from pallas_kernels.kda import tiles
from pallas_kernels.kda.blocks import (
    COMPILER_PARAMS,
    Problem,
    Specs,
    column,
    forward_flops,
    keep_live,
    load_chunk,
    masks_of,
    write_live,
)
from pallas_kernels.kda.steps import CHUNK, Steps
from pallas_kernels.kda.tiles import TILE

# More heads per step pack better, until their values no longer fit the registers.
MAX_HEADS = 32


class Inputs(NamedTuple):
    """Arrays of a call, or their blocks in a step. `initial`, `order` and `rates` where the problem has them; with
    `rates` (exp(A_log) and dt_bias of every channel) g are the gate's logits."""

    q: Float[Array, "B T HK"]
    k: Float[Array, "B T HK"]
    v: Float[Array, "B T HVV"]
    g: Float[Array, "B T HVK"]
    beta: Float[Array, "B T HV"]
    initial: Float[Array, "S HV K V"] | None
    order: Int[Array, "B N 2 C"] | None
    rates: Float[Array, "2 HVK"] | None

    def rates_of(self, at: slice):
        """In a step: of one value head's channels."""
        return None if self.rates is None else self.rates[:, at]


def present_in(problem: Problem) -> Inputs:
    """Which inputs there are."""
    return Inputs(*(True,) * 5, problem.has_initial, problem.has_order, problem.has_gate)


class Outputs(NamedTuple):
    """`states` (transposed, at each step's entry) and `A` are for the backward pass: M steps."""

    o: Float[Array, "B T HVV"]
    final: Float[Array, "S HV K V"]
    states: Float[Array, "M HV V K"] | None = None
    A: Float[Array, "M HV C C"] | None = None


class Scratch(NamedTuple):
    """What stays in VMEM: the state from step to step, the rest from the first pass over the heads to the second."""

    state: Float[Array, "Hb V K"]
    qk_in: Float[Array, "Hb C2 K"]
    k_out: Float[Array, "Hb C K"]
    decay: Float[Array, "Hb 8 K"]
    P: Float[Array, "Hb C C"]
    L: Float[Array, "Hb C C"]
    beta: Float[Array, "Hb C 128"]
    diagonal: Float[Array, "Hb2 S 128"]


def forward(problem: Problem, scalars: Int32[Array, "F M"], inputs: Inputs, dtype: jnp.dtype, save: bool) -> Outputs:
    """`save` adds what the backward pass needs. Operands of products are in `dtype`."""
    heads = problem.heads_per_step(MAX_HEADS)
    specs, steps, (B, T) = Specs(problem, heads), scalars.shape[1], inputs.q.shape[:2]
    K, V, HV = problem.K, problem.V, problem.HV
    like = functools.partial(shape_of, like=inputs.q)
    in_specs = Inputs(specs.key, specs.key, specs.value, specs.gate, specs.beta, specs.state, specs.order, specs.rates)
    out_specs = [specs.value, specs.state, specs.saved(V, K, lambda m: m), specs.saved(CHUNK, CHUNK, lambda m: m)]
    out_shape = [
        like((B, T, HV * V), inputs.v.dtype), like((problem.states, HV, K, V), jnp.float32),
        like((steps, HV, V, K), dtype), like((steps, HV, CHUNK, CHUNK), dtype),
    ]  # fmt: skip
    scratch = Scratch(
        state=((heads, V, K), jnp.float32), qk_in=((heads, 2 * CHUNK, K), dtype), k_out=((heads, CHUNK, K), dtype),
        decay=((heads, 8, K), jnp.float32), P=((heads, CHUNK, CHUNK), dtype), L=((heads, CHUNK, CHUNK), dtype),
        beta=((heads, CHUNK, LANES), jnp.float32), diagonal=((-(-heads // 2), TILE, LANES), jnp.float32),
    )  # fmt: skip
    inputs_here, out_shape = [x for x in inputs if x is not None], out_shape if save else out_shape[:2]
    outputs = pl.pallas_call(
        functools.partial(_kernel, problem=problem, heads=heads, saves=save),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(HV // heads, steps),
            in_specs=[spec for spec, x in zip(in_specs, inputs, strict=True) if x is not None],
            out_specs=out_specs if save else out_specs[:2],
            scratch_shapes=[pltpu.VMEM(*size) for size in scratch],
        ),
        out_shape=out_shape,
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost_of(B * T * HV * forward_flops(K, V), (*inputs_here, *out_shape)),
        name="kda_forward",
    )(scalars, *inputs_here)
    return Outputs(*outputs)


def _kernel(scalars, *refs, problem: Problem, heads: int, saves: bool):
    """One step of a block of heads."""
    refs, m = iter(refs), pl.program_id(1)
    inputs = Inputs(*(next(refs) if here else None for here in present_in(problem)))
    outputs = Outputs(*(next(refs) for _ in range(4 if saves else 2)))
    scratch, steps = Scratch(*refs), Steps(*(scalars.at[i] for i in range(len(Steps._fields))))

    @pl.when(steps.reset[m] == 1)
    def _():
        @pl.loop(0, heads)
        def _(h):
            zero = jnp.zeros(scratch.state.shape[1:], jnp.float32)
            scratch.state[h] = zero if inputs.initial is None else inputs.initial[0, h].T

    masks = masks_of(inputs.order, steps, m) if problem.masked else None
    in_turns(_intra(h, problem, heads, inputs, scratch, masks) for h in range(heads))
    pairs = [range(h, min(h + 2, heads)) for h in range(0, heads, 2)]
    in_turns(_inter(pair, problem, inputs, outputs, scratch, masks) for pair in pairs)

    @pl.when(steps.flush[m] == 1)
    def _():
        @pl.loop(0, heads)
        def _(h):
            outputs.final[0, h] = scratch.state[h].T


def _intra(h, problem: Problem, heads: int, inputs: Inputs, scratch: Scratch, masks):
    """Pass 1 of value head h: everything that needs neither the state nor the inverse."""
    dtype, K, key = scratch.P.dtype, problem.K, problem.key_head(h, heads)
    q, k = (x[0, :, key * K : (key + 1) * K] for x in (inputs.q, inputs.k))
    beta = column(inputs.beta[0].astype(jnp.float32), (pl.program_id(0) * heads + h) % LANES)
    at = slice(h * K, (h + 1) * K)
    chunk = yield from load_chunk(problem, masks, q, k, inputs.g[0, :, at], inputs.rates_of(at), beta, dtype)
    x, L = chunk.products, chunk.beta[:, :CHUNK] * chunk.products.L
    scratch.qk_in[h, :CHUNK], scratch.qk_in[h, CHUNK:], scratch.k_out[h] = x.q_in, x.k_in, x.k_out
    scratch.decay[h] = jnp.broadcast_to(x.decay, scratch.decay.shape[1:])
    scratch.P[h], scratch.L[h], scratch.beta[h] = x.P.astype(dtype), L.astype(dtype), chunk.beta
    lanes = slice(h % 2 * CHUNK, (h % 2 + 1) * CHUNK)
    scratch.diagonal[h // 2, :, lanes] = tiles.diagonal_tiles(L)


def _inter(pair, problem: Problem, inputs: Inputs, outputs: Outputs, scratch: Scratch, masks):
    """Pass 2 of two value heads, whose diagonal tiles fill the 128 lanes: inverse, corrections, outputs, next state."""
    dtype, V = scratch.P.dtype, problem.V
    states = [scratch.state[h].astype(dtype) for h in pair]
    from_state = [dot(scratch.qk_in[h], S, ROWS_BY_ROWS) for h, S in zip(pair, states, strict=True)]
    inverses = yield from tiles.invert_tiles(scratch.diagonal[pair[0] // 2])
    inverses = [inverses[:, i * CHUNK : (i + 1) * CHUNK] for i in range(len(pair))]
    A = yield from tiles.combine_inverses(inverses, [scratch.L[h] for h in pair], dtype)
    A = [x.astype(dtype) for x in A]
    U = []
    for i, h in enumerate(pair):
        if outputs.states is not None:
            outputs.states[0, h], outputs.A[0, h] = states[i], A[i]
        (v,) = keep_live(masks, inputs.v[0, :, h * V : (h + 1) * V].astype(jnp.float32))
        error = jnp.concatenate([scratch.beta[h]] * (V // LANES), axis=1) * (v - from_state[i][CHUNK:])
        U.append(dot(A[i], error.astype(dtype)).astype(dtype))
    yield
    for i, h in enumerate(pair):
        o = (from_state[i][:CHUNK] + dot(scratch.P[h], U[i])) * problem.scale
        write_live(masks, outputs.o, (0, slice(None), slice(h * V, (h + 1) * V)), o.astype(outputs.o.dtype))
    yield
    for i, h in enumerate(pair):
        scratch.state[h] = scratch.decay[h, :1] * scratch.state[h] + dot(U[i], scratch.k_out[h], COLUMNS_BY_ROWS)
