"""Blockwise causal attention of Gated MLA on a TPU core, forward.

A step meets a block of queries with a block of keys, for two heads; the maximum, the sum and the weighted values of the
online softmax stay in VMEM from step to step. A tile of queries goes through three parts: scores of all keys of the
block, their exponentials, and the product with the values. The tiles are written staggered: the scores of one stand
beside the exponentials of the tile before. Both use one array: scores of a tile of keys may be written only where the
tile before has read its own, or the scheduler would compute all scores first, with nothing left for the matrix unit
to do beside the exponentials.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.attention.blocks import (
    HALF,
    HEADS,
    NEGATIVE,
    Inputs,
    Problem,
    Scalars,
    Specs,
    allowed,
    causal_pairs,
    forward_flops,
    split_refs,
)
from pallas_kernels.attention.steps import FULL, MASKED, field
from pallas_kernels.common.kernels import COLUMNS_BY_ROWS, LOG2E, ROWS_BY_ROWS, cost_of, dot, in_turns, shape_of

COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=48 * 2**20
)

QUERIES = 512  # of a tile


class Outputs(NamedTuple):
    """`statistics`: rows 0, 1 the logarithm (base 2) of both heads' sums of exponentials; 2, 3 the largest logits."""

    o: Float[Array, "B T HpV2"]
    statistics: Float[Array, "B Hp 8 T"]


class Scratch(NamedTuple):
    """Rows h of `peak` and `total` and `weighted[h]` are head h's online softmax; the others a tile of queries'."""

    peak: Float[Array, "8 C"]
    total: Float[Array, "8 C"]
    weighted: Float[Array, "2 V C"]
    scores: Float[Array, "C t"]
    weights: Float[Array, "2 C t"]


def forward(problem: Problem, scalars: Scalars, count, inputs: Inputs) -> Outputs:
    p, specs = problem, Specs(problem)
    B, T = inputs.q_nope.shape[:2]
    pairs, tile, dtype = inputs.q_nope.shape[2] // (HEADS * p.N), p.tiles(QUERIES)[0].stop, inputs.kv.dtype
    scratch = Scratch(
        peak=((8, p.block), jnp.float32), total=((8, p.block), jnp.float32),
        weighted=((HEADS, p.V, p.block), jnp.float32), scores=((p.block, tile), jnp.float32),
        weights=((2, p.block, tile), dtype),
    )  # fmt: skip
    here = [x for x in inputs if x is not None]
    out_shape = [
        shape_of((B, T, pairs * HEADS * p.V), dtype, inputs.kv), shape_of((B, pairs, 8, T), jnp.float32, inputs.kv),
    ]  # fmt: skip
    flops, heads = forward_flops(p.N + HALF, p.V), B * pairs * HEADS
    outputs = pl.pallas_call(
        functools.partial(_kernel, problem=problem),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B, pairs, count),
            in_specs=[spec for spec, x in zip(specs.inputs, inputs, strict=True) if x is not None],
            out_specs=[specs.rows("q", HEADS * p.V), specs.statistics()],
            scratch_shapes=[pltpu.VMEM(*size) for size in scratch],
        ),
        out_shape=out_shape,
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost_of(heads * causal_pairs(T, inputs.kv.shape[1]) * flops, (*here, *out_shape)),
        name="attention_forward",
    )(*scalars, *here)
    return Outputs(*outputs)


def _kernel(steps, offset, *refs, problem: Problem):
    """One step of a pair of heads."""
    inputs, refs = split_refs(problem, refs)
    outputs, scratch = Outputs(*refs[:2]), Scratch(*refs[2:])
    step = steps[pl.program_id(0), pl.program_id(2)]
    of, distance = functools.partial(field, step), Scalars(steps, offset).distance(step, problem.block)

    @pl.when(of("continued") == 0)
    def _():
        scratch.peak[...] = jnp.full_like(scratch.peak, NEGATIVE)
        scratch.total[...] = jnp.zeros_like(scratch.total)
        scratch.weighted[...] = jnp.zeros_like(scratch.weighted)

    for kind, mask in ((FULL, None), (MASKED, functools.partial(allowed, inputs, distance))):

        @pl.when(of("kind") == kind)
        def _(mask=mask):
            items = [(h, queries) for queries in problem.tiles(QUERIES) for h in range(HEADS)]
            in_turns(
                (_attend(problem, h, queries, i % 2, inputs, scratch, mask) for i, (h, queries) in enumerate(items)),
                stride=len(problem.tiles()),
            )

    @pl.when(of("continues") == 0)
    def _():
        for h in range(HEADS):
            _finish(problem, h, outputs, scratch)


def _attend(problem: Problem, h: int, queries: slice, slot: int, inputs: Inputs, scratch: Scratch, mask):
    """A tile of queries of head h and all keys of the block."""
    c, row, scores, weights = problem.scale * LOG2E, slice(h, h + 1), scratch.scores, scratch.weights.at[slot]
    q, before = inputs.query(problem, h, queries), scratch.peak[row, queries]
    peaks = NEGATIVE
    for keys in problem.tiles():
        s = dot(inputs.key(problem, h, keys), q, ROWS_BY_ROWS)
        s = s if mask is None else jnp.where(mask(queries, keys), s, NEGATIVE)
        scores[keys] = s
        peaks = jnp.maximum(peaks, jnp.max(_by_sublane(s), axis=0))
        yield
    peak, totals = jnp.maximum(before, jnp.max(peaks, axis=0, keepdims=True)), 0.0
    for keys in problem.tiles():
        p = jnp.exp2((scores[keys] - peak) * c)
        p = p if mask is None else jnp.where(scores[keys] > NEGATIVE, p, 0.0)
        weights[keys] = p.astype(weights.dtype)
        totals = totals + jnp.sum(_by_sublane(p), axis=0)
        yield
    total = jnp.sum(totals, axis=0, keepdims=True)
    fade = jnp.exp2((before - peak) * c)
    scratch.peak[row, queries] = peak
    scratch.total[row, queries] = scratch.total[row, queries] * fade + total
    weighted = dot(inputs.value(problem, h, slice(None)), weights[...], COLUMNS_BY_ROWS)
    scratch.weighted[h, :, queries] = scratch.weighted[h, :, queries] * fade + weighted


def _by_sublane(x: Float[Array, "t q"]) -> Float[Array, "t8 8 q"]:
    """Reduced over its first axis this takes no operation across sublanes."""
    return x.reshape(-1, 8, x.shape[1])


def _finish(problem: Problem, h: int, outputs: Outputs, scratch: Scratch):
    row = slice(h, h + 1)
    total, peak = scratch.total[row], scratch.peak[row]
    some = jnp.where(total == 0, 1.0, total)
    o = scratch.weighted[h] * (1.0 / some)
    outputs.o[0, :, h * problem.V : (h + 1) * problem.V] = o.T.astype(outputs.o.dtype)
    outputs.statistics[0, 0, row] = peak * (problem.scale * LOG2E) + jnp.log2(some)
    outputs.statistics[0, 0, HEADS + h : HEADS + h + 1] = jnp.where(total == 0, NEGATIVE, peak * problem.scale)
