"""Borrowed experts: copies of a donor's weights for one layer and micro-batch, and their gradients' way home."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3_jax.parallel.expert_plan import Plan
from k3_jax.parallel.transport import exchange
from pallas_kernels.common.dispatch import on_tpu, vary_alike


def borrow(w: Float[Array, "m *n"], plan: Plan, axis: str) -> Float[Array, "G *n"]:
    """A rank's own experts, then its donor's: those that it needs (on a CPU all of them)."""
    copies = _fetch(w, plan, axis) if on_tpu() else jax.lax.all_gather(w, axis)[plan.donor[jax.lax.axis_index(axis)]]
    return jnp.concatenate([w, copies])


def give_back(dw: Float[Array, "G *n"], plan: Plan, axis: str) -> Float[Array, "m *n"]:
    """The gradient of a rank's own experts: its own part, and those of all who borrowed them, in dw's type."""
    own, lent = jnp.split(dw, 2)
    return _collect(own, lent, plan, axis) if on_tpu() else own + _scatter(lent, plan, axis)


def _scatter(lent, plan: Plan, axis: str):
    donor = plan.donor[jax.lax.axis_index(axis)]
    everyone = jnp.zeros((plan.donor.shape[0], *lent.shape), lent.dtype)
    everyone, lent, donor = vary_alike(everyone, lent, donor)
    return jax.lax.psum_scatter(everyone.at[donor].set(lent), axis, tiled=False)


def _fetch(w, plan: Plan, axis: str):
    """Only what is needed travels: one piece of one expert, or none, per rank and expert. What did not travel is not
    written either: those groups have no rows."""
    me, lent = jax.lax.axis_index(axis), plan.lent()
    borrows = (plan.donor == me)[:, None] & lent  # [R, m]: what each rank wants of mine
    gives = (jnp.arange(plan.donor.shape[0]) == plan.donor[me])[:, None] & lent[me][None]  # what I want of each rank
    at = jnp.broadcast_to(jnp.arange(plan.home), lent.shape)
    out = jax.lax.empty(w.shape, w.dtype)
    return exchange(w, out, at, at, borrows.astype(jnp.int32), gives.astype(jnp.int32), axis)


def _collect(own, lent_gradient, plan: Plan, axis: str):
    """In turns of m pieces per donor, since many may have borrowed the same expert."""
    me, lent, m = jax.lax.axis_index(axis), plan.lent(), plan.home
    mine = (plan.donor == me)[:, None] & lent  # [R, m]: pieces that come to me
    to_me = (jnp.arange(plan.donor.shape[0]) == plan.donor[me])[:, None]
    number, turns = pieces_home(plan)
    at = jnp.broadcast_to(jnp.arange(m), lent.shape)

    def collect(state):
        turn, total = state
        now = lent & (number // m == turn)
        send, receive = to_me & now[me][None], mine & now
        slot = jnp.broadcast_to((number % m)[me][None], lent.shape)
        out = jax.lax.empty(total.shape, total.dtype)
        arrived = exchange(lent_gradient, out, at, slot, send.astype(jnp.int32), receive.astype(jnp.int32), axis)
        # The expert of each slot; m, which is nowhere, for a slot that nothing came to.
        (nowhere,) = vary_alike(jnp.full(m, m), like=(receive,))
        expert = nowhere.at[jnp.where(receive, number % m, m).reshape(-1)].set(at.reshape(-1), mode="drop")
        return turn + 1, total.at[expert].add(arrived, mode="drop")

    # Ranks of other expert groups have plans of their own; all take part in the largest number of turns.
    turns = jax.lax.pmax(turns, tuple(sorted(jax.typeof(turns).manual_axis_type.varying)))
    start = (jnp.zeros_like(turns), *vary_alike(own, like=(lent_gradient,)))
    return jax.lax.while_loop(lambda state: state[0] < turns, collect, start)[1]


def pieces_home(plan: Plan) -> tuple[Int[Array, "R m"], Int[Array, ""]]:
    """The place of each borrowed expert in the queue of its donor, and in how many turns of m all queues are served."""
    R, m = plan.donor.shape[0], plan.home
    lent, donors = plan.lent(), plan.donor[:, None] == jnp.arange(R)[None]
    queue = jnp.where(donors, lent.sum(1)[:, None], 0)  # [R, donor]: pieces of each rank
    before = jnp.take_along_axis(jnp.cumsum(queue, axis=0) - queue, plan.donor[:, None], axis=1)
    number = before + jnp.cumsum(lent, axis=1) - lent
    return number, -(-jnp.max(queue.sum(0)) // m)
