"""Kimi Delta Attention backward on a TPU core: the steps of the forward in reverse, the state's cotangent in VMEM.

The forward saves each step's entry state S and the inverse A; the rest is computed again. With U = A beta e and
e = v - K_in S (see `tiles`), and d' = scale * do (Kimi Linear report, derived in reverse):

    dU = P^T d' + K_out dS'       Z = A^T dU       dP = tril(d' U^T)       dL = -tril(Z U^T, -1)
    dQ_in = d' S^T                dK_in = -beta Z S^T                      dK_out = U dS'^T
    dv = beta Z                   dbeta = rowsum(Z e) + rowsum(dL <k, D k>)
    dS = Diag(decay) dS' + Q_in^T d' - K_in^T beta Z

No gradient of A is formed (dL needs Z and U alone), and no W. The gradient of a decay is read off those of the
products: with dG_i = q_i dq_i + k_i (dk_i as a row - dk_i as a column), dg_t is the sum of dG over the rows from t to
the chunk's end, of K_out dK_out over the rows before t, and of what the decay of the state contributes. A row's product
with itself has no decay and is kept out of dG, where it would cancel only up to rounding; and so would K_out's, were it
counted as a column and its sum over all rows added: its last row, not decayed at all, is the largest.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.common.kernels import COLUMNS_BY_ROWS, LANES, ROWS_BY_ROWS, cost_of, dot, in_turns, shape_of
from pallas_kernels.kda import tiles
from pallas_kernels.kda.blocks import (
    COMPILER_PARAMS,
    Problem,
    Specs,
    backward_flops,
    column,
    keep_live,
    load_chunk,
    masks_of,
    write_live,
)
from pallas_kernels.kda.gate import GATE_FLOOR, activation_gradients
from pallas_kernels.kda.pallas_fwd import Inputs, Outputs, present_in
from pallas_kernels.kda.steps import CHUNK, Steps
from pallas_kernels.kda.tiles import Cotangents, iota

MAX_HEADS = 8


class Saved(NamedTuple):
    """From the forward pass, and the cotangents of its results."""

    states: Float[Array, "M HV V K"]
    A: Float[Array, "M HV C C"]
    do: Float[Array, "B T HVV"]
    dfinal: Float[Array, "S HV K V"]


class InputGradients(NamedTuple):
    """q's and k's are per value head."""

    q: Float[Array, "B T HVK"]
    k: Float[Array, "B T HVK"]
    v: Float[Array, "B T HVV"]
    g: Float[Array, "B T HVK"]
    beta: Float[Array, "Nb B T Hb"]
    initial: Float[Array, "S HV K V"]
    rates: Float[Array, "2 HVK"] | None = None


def backward(
    problem: Problem, scalars: Int32[Array, "F M"], inputs: Inputs, outputs: Outputs, do, dfinal, dtype: jnp.dtype
) -> InputGradients:
    """Gradients of `inputs` for cotangents of o and of the final states. `scalars` are the forward's steps."""
    heads = problem.heads_per_step(MAX_HEADS)
    specs, steps, (B, T) = Specs(problem, heads), scalars.shape[1], inputs.q.shape[:2]
    K, V, HV = problem.K, problem.V, problem.HV
    like = functools.partial(shape_of, like=inputs.q)
    wide = inputs.q.dtype if problem.group == 1 else jnp.float32
    in_specs = Inputs(specs.key, specs.key, specs.value, specs.gate, specs.beta, None, specs.order, specs.rates)
    reverse = lambda m: steps - 1 - m  # noqa: E731
    saved_specs = Saved(specs.saved(V, K, reverse), specs.saved(CHUNK, CHUNK, reverse), specs.value, specs.state)
    inputs = inputs._replace(initial=None)
    arguments = (*inputs, *Saved(outputs.states, outputs.A, do, dfinal))
    here = [x for x in arguments if x is not None]
    out_specs = [specs.gate, specs.gate, specs.value, specs.gate, specs.beta_gradient, specs.state]
    out_shape = [
        like((B, T, HV * K), wide), like((B, T, HV * K), wide), like((B, T, HV * V), inputs.v.dtype),
        like((B, T, HV * K), inputs.g.dtype), like((HV // heads, B, T, heads), jnp.float32),
        like((problem.states, HV, K, V), jnp.float32),
    ]  # fmt: skip
    if problem.has_gate:
        out_specs.append(specs.rates)
        out_shape.append(like((2, HV * K), jnp.float32))
    gradients = pl.pallas_call(
        functools.partial(_kernel, problem=problem, heads=heads),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(HV // heads, steps),
            in_specs=[spec for spec, x in zip((*in_specs, *saved_specs), arguments, strict=True) if x is not None],
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((heads, V, K), jnp.float32)],
        ),
        out_shape=out_shape,
        compiler_params=COMPILER_PARAMS,
        cost_estimate=cost_of(B * T * HV * backward_flops(K, V), (*here, *out_shape)),
        name="kda_backward",
    )(_reversed(scalars), *here)
    return InputGradients(*gradients)


def _reversed(scalars: Int32[Array, "F M"]) -> Int32[Array, "F M"]:
    """The steps from the last to the first; a chunk's first visit is then its last one."""
    steps = Steps(*scalars[:, ::-1])
    place = jnp.stack([steps.row, steps.chunk])
    changed = jnp.any(place[:, 1:] != place[:, :-1], axis=0).astype(jnp.int32)
    return jnp.stack(steps._replace(fresh=jnp.concatenate([jnp.ones_like(place[0, :1]), changed])))


def _kernel(scalars, *refs, problem: Problem, heads: int):
    refs, m = iter(refs), pl.program_id(1)
    inputs = Inputs(*(next(refs) if here else None for here in present_in(problem)._replace(initial=False)))
    saved = Saved(*(next(refs) for _ in range(4)))
    gradients = InputGradients(*(next(refs) for _ in range(7 if problem.has_gate else 6)))
    (dstate,) = refs
    steps = Steps(*(scalars.at[i] for i in range(len(Steps._fields))))

    @pl.when(steps.flush[m] == 1)
    def _():
        @pl.loop(0, heads)
        def _(h):
            dstate[h] = saved.dfinal[0, h].T

    if gradients.rates is not None:

        @pl.when(m == 0)
        def _():
            gradients.rates[...] = jnp.zeros_like(gradients.rates)

    masks = masks_of(inputs.order, steps, m) if problem.masked else None
    in_turns(_head(h, problem, heads, inputs, saved, gradients, dstate, masks) for h in range(heads))

    @pl.when(steps.reset[m] == 1)
    def _():
        @pl.loop(0, heads)
        def _(h):
            gradients.initial[0, h] = dstate[h].T


def _head(h, problem: Problem, heads: int, inputs: Inputs, saved: Saved, gradients: InputGradients, dstate, masks):
    """Value head h."""
    dtype, K, V, key = saved.A.dtype, problem.K, problem.V, problem.key_head(h, heads)
    of_key, of_gate, of_value = (slice(i * n, (i + 1) * n) for i, n in ((key, K), (h, K), (h, V)))
    q, k = (x[0, :, of_key] for x in (inputs.q, inputs.k))
    beta = column(inputs.beta[0].astype(jnp.float32), (pl.program_id(0) * heads + h) % LANES)
    rates = inputs.rates_of(of_gate)
    chunk = yield from load_chunk(problem, masks, q, k, inputs.g[0, :, of_gate], rates, beta, dtype)
    x, beta = chunk.products, jnp.concatenate([chunk.beta] * (V // LANES), axis=1)
    v, do = keep_live(masks, *(ref[0, :, of_value].astype(jnp.float32) for ref in (inputs.v, saved.do)))
    do, S, A = do * problem.scale, saved.states[0, h], saved.A[0, h]
    error = v - dot(x.k_in, S, ROWS_BY_ROWS)
    yield
    U = dot(A, (beta * error).astype(dtype))
    dS = dstate[h]
    dU = dot(x.P.astype(dtype), do.astype(dtype), COLUMNS_BY_ROWS) + dot(x.k_out, dS.astype(dtype), ROWS_BY_ROWS)
    yield
    Z = dot(A, dU.astype(dtype), COLUMNS_BY_ROWS)
    yield
    write_live(masks, gradients.v, (0, slice(None), of_value), (beta * Z).astype(gradients.v.dtype))
    d = yield from _cotangents(do, beta * Z, Z, U, S, dS, masks, dtype)
    dbeta = jnp.sum(Z * error, axis=1, keepdims=True) + jnp.sum(d.L * x.L, axis=1, keepdims=True)
    write_live(masks, gradients.beta, (0, 0, slice(None), slice(h, h + 1)), dbeta)
    d = d._replace(L=chunk.beta[:, :CHUNK] * d.L)
    by = yield from chunk.pullback(d)
    itself = jnp.sum(do * U, axis=1, keepdims=True)
    dq, dk = by.q + itself * chunk.k, by.k_row + by.k_column + by.k_out + itself * chunk.q
    for ref, gradient in ((gradients.q, dq), (gradients.k, dk)):
        write_live(masks, ref, (0, slice(None), of_gate), gradient.astype(ref.dtype))
    yield
    dG, of_out = chunk.q * by.q + chunk.k * (by.k_row - by.k_column), chunk.k * by.k_out
    dg = tiles.running_sums([iota(1) >= iota(0), iota(1) < iota(0)], [dG, of_out], dtype)
    dg = dg + x.decay * jnp.sum(S.astype(jnp.float32) * dS, axis=0, keepdims=True)
    if problem.bound is None:
        dg = jnp.where(chunk.g < GATE_FLOOR, 0.0, dg)
    if rates is not None:
        (z, dg) = keep_live(masks, inputs.g[0, :, of_gate].astype(jnp.float32), dg)
        dg, *of_rates = activation_gradients(z, rates[:1], rates[1:], problem.bound, dg)
        gradients.rates[:, of_gate] += jnp.concatenate(of_rates)
    write_live(masks, gradients.g, (0, slice(None), of_gate), dg.astype(gradients.g.dtype))
    left, right = jnp.concatenate([do, -beta * Z]).astype(dtype), jnp.concatenate([x.q_in, x.k_in])
    dstate[h] = x.decay * dS + dot(left, right, COLUMNS_BY_ROWS)


def _cotangents(do, dv, Z, U, S, dS, masks, dtype):
    """Of the chunk's products; L's is without beta's factor."""
    row, col = iota(0), iota(1)
    both = dot(jnp.concatenate([do, -Z]).astype(dtype), U.astype(dtype), ROWS_BY_ROWS)
    dP, dL = (jnp.where(col < row, both[i * CHUNK : (i + 1) * CHUNK], 0.0) for i in (0, 1))
    from_state = dot(jnp.concatenate([do, -dv]).astype(dtype), S)
    k_out = dot(U.astype(dtype), dS.astype(dtype))
    yield
    d = Cotangents(dP, dL, from_state[:CHUNK], from_state[CHUNK:], k_out)
    if masks is None or masks.same is None:
        return d
    return Cotangents(
        P=jnp.where(masks.same, d.P, 0.0),
        L=jnp.where(masks.same, d.L, 0.0),
        q_in=jnp.where(masks.entry, d.q_in, 0.0),
        k_in=jnp.where(masks.entry, d.k_in, 0.0),
        k_out=jnp.where(masks.last, d.k_out, 0.0),
    )
