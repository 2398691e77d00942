"""The Pallas form of `mla_attention`: from the public arrays to the kernels' blocks and back, and its custom gradient.

Saved for the backward pass beyond the inputs: the output and, per token and head, the sum of exponentials (4 bytes).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.blocks import HALF, HEADS, Inputs, Problem, Scalars
from pallas_kernels.attention.pallas_bwd import KeyGradients, Saved, backward
from pallas_kernels.attention.pallas_fwd import forward
from pallas_kernels.attention.steps import Pairs, Steps, by_keys, by_queries, pairs_of, with_unseen
from pallas_kernels.common.dispatch import vary_alike
from pallas_kernels.common.kernels import LANES

BLOCK = {2: 1024, 4: 512}  # queries and keys of a block, by bytes of a number: what VMEM has room for
SPAN = 8192  # queries whose gradients are summed in VMEM
MOST_STEPS = 200_000  # words, of the scalar memory of a core: 1 MiB


def mla_attention_pallas(
    q_nope: Float[Array, "B T H N"],
    q_pe: Float[Array, "B T H R"],
    kv: Float[Array, "B S H NV"],
    k_pe: Float[Array, "B S R"],
    segment_ids: Int[Array, "B S"] | None,
    *,
    scale: float,
    start: Int[Array, ""] | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """Arguments and results as in `api.mla_attention`; N and V are padded to whole lanes, H to pairs."""
    (B, T, H, N), V = q_nope.shape, kv.shape[-1] - q_nope.shape[-1]
    wide_n, wide_v = (-(-x // LANES) * LANES for x in (N, V))
    block = _block(T, BLOCK[kv.dtype.itemsize], start is None)
    queries, keys = (-(-x // block) for x in (T, kv.shape[1]))
    if (steps := B * (queries * keys - queries * (queries - 1) // 2)) > MOST_STEPS:
        raise ValueError(
            f"q_nope.shape = {q_nope.shape}: expected fewer or shorter rows for 'pallas': {steps} pairs of blocks of "
            f"{block} tokens, and a core's scalar memory holds {MOST_STEPS}"
        )
    if segment_ids is None and T % block:
        segment_ids = jnp.zeros((B, T), jnp.int32)
    rows = (0, -T % block)

    def flat(x, width):
        """[B, T, H, _] with every part filled up, heads side by side."""
        x = jnp.pad(x, ((0, 0), rows, (0, H % HEADS), (0, width - x.shape[3])))
        return x.reshape(*x.shape[:2], -1)

    def flat_pair(x):
        k, v = jnp.split(x, [N], axis=3)
        parts = (jnp.pad(part, [(0, 0)] * 3 + [(0, w - part.shape[3])]) for part, w in ((k, wide_n), (v, wide_v)))
        return flat(jnp.concatenate(list(parts), axis=3), wide_n + wide_v)

    k_pe = jnp.pad(k_pe, ((0, 0), rows, (0, HALF - k_pe.shape[2])))
    nothing = jnp.zeros_like(k_pe)
    segment = None
    if segment_ids is not None:
        segment = jnp.pad(segment_ids, ((0, 0), rows), constant_values=-1)
    problem = Problem(wide_n, wide_v, scale, block, segment is not None)
    extra = jnp.concatenate([k_pe, nothing, nothing, k_pe], axis=2)
    offset = None if start is None else start[None].astype(jnp.int32) // block
    arrays = flat(q_nope, wide_n), flat(q_pe, HALF), flat_pair(kv), extra, segment, offset
    there = iter(vary_alike(*(x for x in arrays if x is not None)))
    o, peak = _attention(problem, *(x if x is None else next(there) for x in arrays))
    return o.reshape(B, T + rows[1], -1, wide_v)[:, :T, :H, :V], jax.lax.stop_gradient(peak[:H])


def _block(T: int, most: int, padded: bool) -> int:
    """Tokens of a block, whole lanes. What is not padded has whole blocks."""
    if padded:
        return min(most, -(-T // LANES) * LANES)
    return next(size for size in range(most, 0, -LANES) if T % size == 0)


def _inputs(q_nope, q_pe, kv, extra, segment, offset) -> Inputs:
    segment = None if segment is None else segment[:, None]
    return Inputs(q_nope, q_pe, kv, extra, segment, segment)


def _pairs(problem: Problem, q_nope, q_pe, kv, extra, segment, offset) -> Pairs:
    (B, T), S = q_nope.shape[:2], kv.shape[1]
    return pairs_of(segment, B, T // problem.block, S // problem.block, 0 if offset is None else offset[0])


def _table(steps_and_count: tuple[Steps, Array], segment, offset):
    """Scalars of a call, and the length of its grid: known before it runs if nothing but causality decides it."""
    steps, count = steps_and_count
    count = steps.q.shape[1] if segment is None and offset is None else count
    return Scalars(steps.words(), jnp.zeros(1, jnp.int32) if offset is None else offset), count


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(problem: Problem, q_nope, q_pe, kv, extra, segment, offset):
    return _attention_fwd(problem, q_nope, q_pe, kv, extra, segment, offset)[0]


def _attention_fwd(problem: Problem, *arrays):
    outputs = forward(problem, *_table(by_queries(_pairs(problem, *arrays)), *arrays[4:]), _inputs(*arrays))
    peak = jnp.max(outputs.statistics[:, :, HEADS : 2 * HEADS], axis=(0, 3)).reshape(-1)
    return (outputs.o, peak), (arrays, outputs)


def _attention_bwd(problem: Problem, saved, cotangents):
    (arrays, outputs), (do, _) = saved, cotangents
    inputs, (B, T) = _inputs(*arrays), arrays[0].shape[:2]
    delta = _sum_of_heads(do.astype(jnp.float32) * outputs.o.astype(jnp.float32), problem.V)
    rows = jnp.concatenate([outputs.statistics[:, :, :HEADS], delta.reshape(B, -1, HEADS, T)], axis=2)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 8 - rows.shape[2]), (0, 0)))
    of_queries, of_keys = _all_spans(problem, arrays, Saved(do, rows))
    of_pairs = jnp.split(of_keys.extra, of_keys.extra.shape[2] // LANES, axis=2)  # cut at lane tiles: no copies
    both = functools.reduce(jnp.add, of_pairs)
    half = (both[..., :HALF] + both[..., HALF:]).astype(inputs.extra.dtype)
    extra = jnp.pad(half, ((0, 0), (0, 0), (0, inputs.extra.shape[2] - HALF)))
    return *of_queries, of_keys.kv.astype(inputs.kv.dtype), extra, None, None


def _sum_of_heads(x: Float[Array, "B T HV"], V: int) -> Float[Array, "B H T"]:
    """As a product with zeros and ones: sums of lanes, and rows of them, are slow outside the matrix unit."""
    heads = jnp.repeat(jnp.eye(x.shape[2] // V, dtype=x.dtype), V, axis=0)
    return jnp.einsum("btv,vh->bht", x, heads, precision=jax.lax.Precision.HIGHEST)


def _all_spans(problem: Problem, arrays, saved: Saved):
    """The backward kernel for every span of queries, one after the other."""
    pairs, inputs, decided_by = _pairs(problem, *arrays), _inputs(*arrays), arrays[4:]
    blocks, most = pairs.live.shape[1], SPAN // problem.block
    if blocks <= most:
        table = _table(by_keys(with_unseen(pairs), 0, blocks), *decided_by)
        return backward(problem, blocks, *table, inputs, saved, None)

    def span(earlier, table):
        scalars, count = table
        of_queries, of_keys = backward(problem, most, scalars, count, inputs, saved, earlier)
        return of_keys, of_queries

    def table(first):
        steps, count = by_keys(pairs, first, most)
        return _table((steps, count), *decided_by)[0], count

    widths = inputs.kv.shape[2], inputs.q_pe.shape[2]
    zero = KeyGradients(*(jnp.zeros_like(inputs.kv, jnp.float32, shape=(*inputs.kv.shape[:2], w)) for w in widths))
    # The tables outside of the loop: libtpu 0.0.50 fails on the gathers that make them inside one.
    tables = jax.vmap(table)(jnp.arange(0, blocks, most))
    of_keys, of_queries = jax.lax.scan(span, zero, tables)
    whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[3])[:, : blocks * problem.block]  # noqa: E731
    return jax.tree.map(whole, of_queries), of_keys


_attention.defvjp(_attention_fwd, _attention_bwd)
