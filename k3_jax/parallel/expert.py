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
from k3_jax.parallel.grouped import grouped_matmul, grouped_outer
from k3_jax.parallel.loan import borrow, give_back
from k3_jax.parallel.transport import Gathered, Local, Ragged, Transport
from pallas_kernels.common.dispatch import on_tpu, vary_alike

Activation = Callable[[Array, Array], Array]
# Up to so many ranks reading every token costs no more than sending each row: R S L against k S L.
FEW_RANKS = 16


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
    count = partial(jnp.bincount, flat)
    if axis is None:
        return Route(Local(order, k), count(length=experts), None)
    R = jax.lax.axis_size(axis)
    plan = make_plan(jax.lax.all_gather(count(length=R * experts), axis))
    sizes = plan.groups()[1][jax.lax.axis_index(axis)]
    if on_tpu() and R > FEW_RANKS:
        return Route(Ragged.of(plan, order, k, axis, dtype), sizes, plan)
    return Route(Gathered.of(plan, order, k, axis), sizes, plan)


def _with_loans(weights, route: Route, axis):
    return tuple(w if route.plan is None else borrow(w, route.plan, axis) for w in weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(activation, axis, z, p, chosen, w1, w3, w2):
    return _forward(activation, axis, z, p, chosen, w1, w3, w2)[0]


def _forward(activation, axis, z, p, chosen, *weights):
    route = route_of(chosen, weights[0].shape[0], axis, z.dtype)
    w1, w3, w2 = _with_loans(weights, route, axis)
    x = route.transport.rows(z)
    h = activation(*(grouped_matmul(x, w, route.sizes).astype(z.dtype) for w in (w1, w3)))
    y = route.transport.column(p)[:, None] * grouped_matmul(h, w2, route.sizes)
    return route.transport.combine(y), (route, z, p, weights)


def _backward(activation, axis, saved, du):
    """p's gradient is <du, w2 h> = <w2^T du, h>: w2^T du is needed for h's gradient anyway, w2 h is not."""
    route, z, p, weights = saved
    w1, w3, w2 = _with_loans(weights, route, axis)
    transport, sizes = route.transport, route.sizes
    x, dy, weight = transport.rows(z), transport.rows(du.astype(z.dtype)), transport.column(p)[:, None]
    h, pullback = jax.vjp(activation, *(grouped_matmul(x, w, sizes).astype(z.dtype) for w in (w1, w3)))
    dh = grouped_matmul(dy, jnp.swapaxes(w2, 1, 2), sizes)
    dp = transport.column_back(jnp.sum(dh * h.astype(jnp.float32), axis=1))
    dgate, dup = pullback((weight * dh).astype(h.dtype))
    dx = grouped_matmul(dgate, jnp.swapaxes(w1, 1, 2), sizes) + grouped_matmul(dup, jnp.swapaxes(w3, 1, 2), sizes)
    dz = transport.combine(dx).astype(z.dtype)
    weighted = (weight * dy.astype(jnp.float32)).astype(z.dtype)
    dws = grouped_outer(x, dgate, sizes), grouped_outer(x, dup, sizes), grouped_outer(h, weighted, sizes)
    dws = (dw if route.plan is None else give_back(dw, route.plan, axis) for dw in dws)
    return dz, dp, None, *(dw.astype(w.dtype) for dw, w in zip(dws, weights, strict=True))


_experts.defvjp(_forward, _backward)
