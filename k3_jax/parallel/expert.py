"""Routed experts, balanced exactly: MoonEP (report §5.2.1) with a backward pass that saves only its inputs (§5.2.2).

    u_t = sum_j p_tj w2_j act(w1_j z_t, w3_j z_t)      over the experts j that token t chose

S tokens and k choices per token on a rank make N = S k rows there, and N rows to compute, whatever was chosen.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax.parallel.expert_plan import Plan, make_plan
from k3_jax.parallel.grouped import grouped_matmul, grouped_outer, grouped_transposed
from k3_jax.parallel.loan import borrow, give_back
from k3_jax.parallel.transport import Gathered, Local, Ragged, Transport
from pallas_kernels.common.dispatch import on_tpu, vary_alike

Activation = Callable[[Array, Array], Array]
# Up to so many ranks reading every token costs less than sending each row: R S L there and twice that back, in float32,
# against k S L each way; equal at R = 2 k / 3.
FEW_RANKS = 8
# Compiler options for TPUs: SparseCores move the rows while the TensorCore multiplies.
TPU_OPTIONS = {"xla_tpu_enable_sparse_core_collective_offload_ragged_all_to_all": True}


def routed_experts(
    z: Float[Array, "S L"],
    p: Float[Array, "S k"],
    chosen: Int[Array, "S k"],
    w1: Float[Array, "m L F"],
    w3: Float[Array, "m L F"],
    w2: Float[Array, "m F L"],
    *,
    activation: Activation,
    axis: str | None,
) -> Float[Array, "S L"]:
    """One rank's tokens and its own m of the E experts, in float32. `axis` is the mesh axis of the ranks, inside
    jax.shard_map; None: one rank, which has all experts.

    Operands are in z's type, sums are float32; `p` is float32. Forward and backward move rows once each way; the
    backward pass moves them again instead of keeping them, and no output of an expert is kept for p's gradient.
    """
    return _experts(activation, axis, *vary_alike(z, p, chosen, w1, w3, w2))


class Route(NamedTuple):
    """Everything that depends on the choices alone. `plan` is None on one rank."""

    transport: Transport
    sizes: Int[Array, " G"]  # rows of each group of this rank
    plan: Plan | None


def route_of(chosen: Int[Array, "S k"], experts: int, axis: str | None, dtype: DTypeLike) -> Route:
    """`experts` are those at home on each rank; rows travel in `dtype`."""
    flat, k = chosen.reshape(-1), chosen.shape[1]
    order = jnp.argsort(flat)  # stable: rows of one expert keep their order
    R = jax.lax.axis_size(axis) if axis else 1
    # Neither counts nor the way back by scatters, which are serial on a TPU.
    counts = jnp.diff(jnp.searchsorted(flat[order], jnp.arange(R * experts), side="right"), prepend=0)
    inverse = jnp.argsort(order)
    if axis is None:
        return Route(Local(order, inverse, k), counts, None)
    plan = make_plan(jax.lax.all_gather(counts, axis))
    sizes = plan.groups()[1][jax.lax.axis_index(axis)]
    if on_tpu() and R > FEW_RANKS:
        return Route(Ragged.of(plan, order, inverse, k, axis, dtype), sizes, plan)
    return Route(Gathered.of(plan, order, k, axis), sizes, plan)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(activation, axis, z, p, chosen, w1, w3, w2):
    return _forward(activation, axis, z, p, chosen, w1, w3, w2)[0]


def _forward(activation, axis, z, p, chosen, *weights):
    route = route_of(chosen, weights[0].shape[0], axis, z.dtype)
    (w1, w3, w2), scale, departed = _embark(route, axis, weights, p, z)

    def hidden(sizes, x):
        return activation(*(grouped_matmul(x, w, sizes, z.dtype) for w in (w1, w3)))

    def output(sizes, scale, h):
        return scale * grouped_matmul(h, w2, sizes), ()

    u, _ = _by_chunks(hidden, output, route, scale, departed)
    return u, (route, z, p, weights)


def _backward(activation, axis, saved, du):
    """p's gradient is <du, w2 h> = <w2^T du, h>: w2^T du is needed for h's gradient anyway, w2 h is not."""
    route, z, p, weights = saved
    both = jnp.concatenate([z, du.astype(z.dtype)], axis=1)
    (w1, w3, w2), scale, departed = _embark(route, axis, weights, p, both)

    def hidden(sizes, rows):
        x, dy = jnp.split(rows, 2, axis=1)
        gate, up = (grouped_matmul(x, w, sizes, z.dtype) for w in (w1, w3))
        return x, dy, gate, up, grouped_transposed(dy, w2, sizes)

    def gradients(sizes, scale, found):
        x, dy, gate, up, dh = found
        h, pullback = jax.vjp(activation, gate, up)
        dgate, dup = pullback((scale * dh).astype(h.dtype))
        dx = grouped_transposed(dgate, w1, sizes) + grouped_transposed(dup, w3, sizes)
        dscale = jnp.sum(dh * h.astype(jnp.float32), axis=1)
        return dx, (dscale, x, h, dgate, dup, (scale * dy.astype(jnp.float32)).astype(z.dtype))

    dz, rest = _by_chunks(hidden, gradients, route, scale, departed)
    # Over all rows at once: a gradient of all weights per chunk would cost more than the products.
    dscale, x, h, dgate, dup, dy = map(jnp.concatenate, zip(*rest, strict=True))
    dz, dp = dz.astype(z.dtype), route.transport.column_back(dscale)
    dws = (grouped_outer(a, b, route.sizes) for a, b in ((x, dgate), (x, dup), (h, dy)))
    dws = (dw if route.plan is None else give_back(dw, route.plan, axis) for dw in dws)
    return dz, dp, None, *(dw.astype(w.dtype) for dw, w in zip(dws, weights, strict=True))


_experts.defvjp(_forward, _backward)


def _embark(route: Route, axis, weights, p, x):
    """Weights with those that are borrowed, the rows' scales, and x ready to travel, after both of them."""
    weights = tuple(w if route.plan is None else borrow(w, route.plan, axis) for w in weights)
    scale, departed = route.transport.column(p)[:, None], route.transport.depart(x)
    return in_order(weights, scale, departed)


def in_order(*values):
    """The same values, all of them computed before any is used."""
    return jax.lax.optimization_barrier(values)


def _by_chunks(first: Callable, second: Callable, route: Route, scale: Float[Array, "N 1"], departed: Array):
    """Computes this rank's rows: y, more = second(sizes, scale, first(sizes, rows)) of every chunk. Returns the tokens'
    sums of y and the list of all `more`.

    A chunk's rows travel under `second` of the one before, its results travel back under `first` of the next. The
    barriers say so; left alone, XLA sends everything before it computes anything, and sends it back at the end.
    """
    transport, C = route.transport, route.transport.chunks
    scales, ends, n = jnp.split(scale, C), jnp.cumsum(route.sizes), scale.shape[0] // C
    y, returned, rest = None, None, []
    for chunk in range(C):
        sizes = jnp.diff(jnp.clip(ends - chunk * n, 0, n), prepend=0)
        rows, y = in_order(transport.arrive(departed, chunk), y)
        if chunk:
            returned = transport.give(returned, y, chunk - 1)
        found, returned, departed = in_order(first(sizes, rows), returned, departed)
        y, more = second(sizes, scales[chunk], found)
        rest.append(more)
    return transport.combine(transport.give(returned, y, C - 1)), rest
