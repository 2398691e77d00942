"""The Pallas form of `chunk_kda`: from the public arrays to the kernels' blocks and back, and its custom gradient.

Saved for the backward pass, beyond the inputs, in the inputs' type (bytes per token and head at K = V = 128, bfloat16):
the entry state of every chunk, 512, and the inverse of its triangular system, 128. Computing the states again would be
a second forward scan; the inverse is the only serial part of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.common.dispatch import vary_alike
from pallas_kernels.common.kernels import LANES
from pallas_kernels.kda.blocks import Problem
from pallas_kernels.kda.pallas_bwd import backward
from pallas_kernels.kda.pallas_fwd import Inputs, Outputs, forward, present_in
from pallas_kernels.kda.steps import CHUNK, Steps, segment_order, steps_of_rows, steps_of_segments


def chunk_kda_pallas(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV K"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float,
    initial_state: Float[Array, "S HV K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    segment_offsets: Int[Array, "N1"] | None = None,
    gate_lower_bound: float | None = None,
    rates: tuple[Float[Array, "HV"], Float[Array, "HV K"]] | None = None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "S HV K V"]]:
    """Arguments and results as in `api.chunk_kda`; products in bfloat16 where q, k and v are, else in float32.

    With `rates` = (exp(A_log), dt_bias) g are logits, and the gate is applied inside the kernels.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    order, steps, states = None, None, B
    if segment_ids is not None:
        numbers, live = segment_order(jnp.pad(segment_ids, ((0, 0), (0, -T % CHUNK)), constant_values=-1))
        steps = steps_of_rows(B, T, numbers)
        order = jnp.stack([numbers, live.astype(jnp.int32)], axis=1).reshape(B, 2, -1, CHUNK).swapaxes(1, 2)
    elif segment_offsets is not None:
        steps, states = steps_of_segments(segment_offsets, T), segment_offsets.shape[0] - 1
    else:
        steps = steps_of_rows(B, T, None)
    channels, values = (-(-x // LANES) * LANES for x in (K, V))
    problem = Problem(
        H, HV, channels, values, scale, gate_lower_bound, states=states, has_initial=initial_state is not None,
        has_order=order is not None, has_gate=rates is not None,
        masked=not (segment_ids is segment_offsets is None and T % CHUNK == 0),
    )  # fmt: skip
    if initial_state is not None:
        padding = ((0, 0), (0, 0), (0, channels - K), (0, values - V))
        initial_state = jnp.pad(initial_state.astype(jnp.float32), padding)
    if rates is not None:
        pair = jnp.broadcast_to(rates[0][:, None], rates[1].shape), rates[1]
        rates = jnp.stack([jnp.pad(x, ((0, 0), (0, channels - K))).reshape(-1) for x in pair])
    q, k, v, g = _flat(q, channels), _flat(k, channels), _flat(v, values), _flat(g, channels)
    inputs = Inputs(q, k, v, g, beta, initial_state, order, rates)
    present = tuple(x for x in (jnp.stack(steps), *inputs) if x is not None)
    o, final = _kda(problem, *_with_none(problem, vary_alike(*present)))
    return o.reshape(B, T, HV, values)[..., :V], final[:, :, :K, :V]


def _flat(x: Float[Array, "B T H K"], channels: int) -> Float[Array, "B T HK"]:
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, channels - x.shape[-1])])
    return x.reshape(*x.shape[:2], -1)


def _with_none(problem: Problem, arrays):
    """(scalars, Inputs) of the arrays that there are."""
    scalars, *arrays = arrays
    arrays = iter(arrays)
    return scalars, Inputs(*(next(arrays) if here else None for here in present_in(problem)))


def _dtype(inputs: Inputs):
    return jnp.dtype(jnp.bfloat16 if all(x.dtype == jnp.bfloat16 for x in inputs[:3]) else jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(problem: Problem, scalars, inputs: Inputs):
    outputs = forward(problem, scalars, inputs, _dtype(inputs), save=False)
    return outputs.o, _final(problem, scalars, inputs, outputs)


def _final(problem: Problem, scalars, inputs: Inputs, outputs: Outputs):
    """Segments without tokens end with the state that they begin with."""
    visited = _visited(problem, scalars)
    return jnp.where(
        visited, outputs.final, jnp.zeros_like(outputs.final) if inputs.initial is None else inputs.initial
    )


def _visited(problem: Problem, scalars):
    steps = Steps(*scalars)
    return jnp.zeros(problem.states, jnp.int32).at[steps.slot].max(steps.reset)[:, None, None, None] > 0


def _kda_fwd(problem: Problem, scalars, inputs: Inputs):
    outputs = forward(problem, scalars, inputs, _dtype(inputs), save=True)
    return (outputs.o, _final(problem, scalars, inputs, outputs)), (
        scalars,
        inputs,
        outputs._replace(o=None, final=None),
    )


def _kda_bwd(problem: Problem, saved, cotangents):
    scalars, inputs, outputs = saved
    do, dfinal = cotangents
    d = backward(problem, scalars, inputs, outputs, do, dfinal, _dtype(inputs))
    B, T = inputs.q.shape[:2]

    def over_group(x, like):
        x = x.reshape(B, T, problem.H, problem.group, problem.K).sum(3) if problem.group > 1 else x
        return x.reshape(like.shape).astype(like.dtype)

    beta = jnp.moveaxis(d.beta, 0, 2).reshape(inputs.beta.shape).astype(inputs.beta.dtype)
    initial = None if inputs.initial is None else jnp.where(_visited(problem, scalars), d.initial, dfinal)
    return None, Inputs(over_group(d.q, inputs.q), over_group(d.k, inputs.k), d.v, d.g, beta, initial, None, d.rates)


_kda.defvjp(_kda_fwd, _kda_bwd)
