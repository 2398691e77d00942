"""Blockwise causal attention of Gated MLA on a TPU core, backward, in one pass over the pairs of blocks.

With p = exp(scale q k - logsumexp) and delta = <do, o> of every query (FlashAttention-2, section 2.3):

    dv = p^T do        ds = p (do v^T - delta)        dk = scale ds^T q        dq = scale ds k

Blocks of keys are outermost: their gradients are summed in VMEM while the queries pass. Those of the queries are
summed in VMEM too, for a span of queries at a time; longer sequences run the kernel once for each span, and the keys'
gradients go on from where they were.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.attention.blocks import (
    HALF,
    HEADS,
    Inputs,
    Problem,
    Scalars,
    Specs,
    allowed,
    backward_flops,
    causal_pairs,
    split_refs,
)
from pallas_kernels.attention.steps import FULL, MASKED, field
from pallas_kernels.common.kernels import COLUMNS_BY_ROWS, LANES, LOG2E, ROWS_BY_ROWS, cost_of, dot, in_turns, shape_of

COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=56 * 2**20
)


class Saved(NamedTuple):
    """`statistics`: rows 0, 1 as the forward's, rows 2, 3 delta of both heads."""

    do: Float[Array, "B T HpV2"]
    statistics: Float[Array, "B Hp 8 T"]


class KeyGradients(NamedTuple):
    """`extra`: in each half the part of one head of the pair."""

    kv: Float[Array, "B S HpNV2"]
    extra: Float[Array, "B S HpR2"]


class QueryGradients(NamedTuple):
    q_nope: Float[Array, "B T HpN2"]
    q_pe: Float[Array, "B T HpR2"]


class Scratch(NamedTuple):
    """Sums over steps (of queries transposed, for both heads; `q_pe` over the heads), and a block pair's weights and
    cotangents of scores for each head."""

    q_nope: Float[Array, "2 N S"]
    q_pe: Float[Array, "128 S"]
    k: Float[Array, "2 C NR"]
    v: Float[Array, "2 C V"]
    p: Float[Array, "2 C C"]
    ds: Float[Array, "2 C C"]


def backward(
    problem: Problem, span: int, scalars: Scalars, count, inputs: Inputs, saved: Saved, earlier
) -> tuple[QueryGradients, KeyGradients]:
    """Gradients for the queries of the steps, at most `span` blocks of them; `earlier` (KeyGradients in float32 or
    None) is what other queries gave the keys."""
    p, specs = problem, Specs(problem)
    B, S = inputs.kv.shape[:2]
    pairs, dtype = inputs.q_nope.shape[2] // (HEADS * p.N), inputs.kv.dtype

    def shape(length, width, dtype):
        return shape_of((B, length, pairs * width), dtype, inputs.kv)

    of_keys = KeyGradients(specs.rows("k", HEADS * (p.N + p.V)), specs.rows("k", LANES))
    of_queries = QueryGradients(*(specs.rows_of_span(span, width) for width in (HEADS * p.N, LANES)))
    summed = dtype if earlier is None else jnp.float32
    arguments = [*scalars, *(x for x in (*inputs, *saved, *(earlier or ())) if x is not None)]
    scratch = Scratch(
        q_nope=((HEADS, p.N, span * p.block), jnp.float32), q_pe=((LANES, span * p.block), jnp.float32),
        k=((HEADS, p.block, p.N + LANES), jnp.float32), v=((HEADS, p.block, p.V), jnp.float32),
        p=((HEADS, p.block, p.block), dtype), ds=((HEADS, p.block, p.block), dtype),
    )  # fmt: skip
    out_shape = [
        shape(span * p.block, HEADS * p.N, dtype), shape(span * p.block, LANES, dtype),
        shape(S, HEADS * (p.N + p.V), summed), shape(S, LANES, jnp.float32),
    ]  # fmt: skip
    flops = B * pairs * HEADS * causal_pairs(span * p.block, S) * backward_flops(p.N + HALF, p.V)
    outputs = pl.pallas_call(
        functools.partial(_kernel, problem=problem, span=span, accumulates=earlier is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B, pairs, count),
            in_specs=[spec for spec, x in zip(specs.inputs, inputs, strict=True) if x is not None]
            + [specs.rows("q", HEADS * p.V), specs.statistics(), *(of_keys if earlier else ())],
            out_specs=[*of_queries, *of_keys],
            scratch_shapes=[pltpu.VMEM(*size) for size in scratch],
        ),
        out_shape=out_shape,
        input_output_aliases={len(arguments) - 2: 2, len(arguments) - 1: 3} if earlier else {},
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost_of(flops, (*arguments, *out_shape)),
        name="attention_backward",
    )(*arguments)
    return QueryGradients(*outputs[:2]), KeyGradients(*outputs[2:])


def _kernel(steps, offset, *refs, problem: Problem, span: int, accumulates: bool):
    """One step of a pair of heads."""
    inputs, refs = split_refs(problem, refs)
    refs, m = iter(refs), pl.program_id(2)
    saved = Saved(next(refs), next(refs))
    earlier = KeyGradients(next(refs), next(refs)) if accumulates else None
    of_queries, of_keys = QueryGradients(next(refs), next(refs)), KeyGradients(next(refs), next(refs))
    scratch, step = Scratch(*refs), steps[pl.program_id(0), m]
    of, distance = functools.partial(field, step), Scalars(steps, offset).distance(step, problem.block)
    start = pl.multiple_of(of("q") % span * problem.block, problem.block)

    @pl.when(m == 0)
    def _():
        scratch.q_nope[...] = jnp.zeros_like(scratch.q_nope)
        scratch.q_pe[...] = jnp.zeros_like(scratch.q_pe)

    @pl.when(of("continued") == 0)
    def _():
        scratch.k[...] = jnp.zeros_like(scratch.k)
        scratch.v[...] = jnp.zeros_like(scratch.v)

    for kind, mask in ((FULL, None), (MASKED, functools.partial(allowed, inputs, distance))):

        @pl.when(of("kind") == kind)
        def _(mask=mask):
            in_turns(_programs(problem, start, inputs, saved, scratch, mask), stride=2 * len(problem.tiles()))

    @pl.when((distance == 0) & (of("kind") == MASKED))  # the diagonal: these queries see no later keys
    def _():
        for h in range(HEADS):
            nope = scratch.q_nope[h, :, pl.ds(start, problem.block)] * problem.scale
            of_queries.q_nope[0, :, h * problem.N : (h + 1) * problem.N] = nope.T.astype(of_queries.q_nope.dtype)
        of_queries.q_pe[0] = (scratch.q_pe[:, pl.ds(start, problem.block)] * problem.scale).T.astype(
            of_queries.q_pe.dtype
        )

    @pl.when(of("continues") == 0)
    def _():
        _finish(problem, earlier, of_keys, scratch)


def _programs(problem: Problem, start, inputs: Inputs, saved: Saved, scratch: Scratch, mask):
    for h in range(HEADS):
        for queries in problem.tiles():
            yield _scores(problem, h, queries, start, inputs, saved, scratch, mask)
        yield _keys(problem, h, inputs, saved, scratch)


def _scores(problem: Problem, h: int, queries: slice, start, inputs: Inputs, saved: Saved, scratch: Scratch, mask):
    """A tile of queries of head h and all keys of the block: weights, cotangents of scores, and of the queries."""
    c, N, V, dtype = problem.scale * LOG2E, problem.N, problem.V, scratch.p.dtype
    q, do = inputs.query(problem, h, queries), saved.do[0, queries, h * V : (h + 1) * V]
    total, delta = (saved.statistics[0, 0, i + h : i + h + 1, queries] for i in (0, HEADS))
    for keys in problem.tiles():
        s = dot(inputs.key(problem, h, keys), q, ROWS_BY_ROWS)
        dp = dot(inputs.value(problem, h, keys), do, ROWS_BY_ROWS)
        yield
        p = jnp.exp2(s * c - total)
        p = p if mask is None else jnp.where(mask(queries, keys), p, 0.0)
        scratch.p[h, keys, queries] = p.astype(dtype)
        scratch.ds[h, keys, queries] = (p * (dp - delta)).astype(dtype)
        yield
    dq = dot(inputs.key(problem, h, slice(None)), scratch.ds[h, :, queries], COLUMNS_BY_ROWS)
    at = pl.ds(start + queries.start, queries.stop - queries.start)
    scratch.q_nope[h, :, at] += dq[:N]
    scratch.q_pe[:, at] += dq[N:]  # zero in the other head's half


def _keys(problem: Problem, h: int, inputs: Inputs, saved: Saved, scratch: Scratch):
    """Gradients of the block's keys and values from all its queries, once their scores are there."""
    for _ in range(2 * len(problem.tiles()) + 2):
        yield
    q, do = inputs.query(problem, h, slice(None)), saved.do[0, :, h * problem.V : (h + 1) * problem.V]
    for keys in problem.tiles():
        scratch.v[h, keys] += dot(scratch.p[h, keys], do)
        yield
        scratch.k[h, keys] += dot(scratch.ds[h, keys], q)
        yield


def _finish(problem: Problem, earlier, of_keys: KeyGradients, scratch: Scratch):
    N, V = problem.N, problem.V
    first, second = (scratch.k[h, :, N:] for h in range(HEADS))
    own = jax.lax.broadcasted_iota(jnp.int32, first.shape, 1) < HALF
    extra = jnp.where(own, first, second) * problem.scale
    of_keys.extra[0] = extra if earlier is None else extra + earlier.extra[0]
    for h in range(HEADS):
        for x, start in ((scratch.k[h, :, :N] * problem.scale, 0), (scratch.v[h], N)):
            at = slice(h * (N + V) + start, h * (N + V) + start + x.shape[1])
            x = x if earlier is None else x + earlier.kv[0, :, at]
            of_keys.kv[0, :, at] = x.astype(of_keys.kv.dtype)
