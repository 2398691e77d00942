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
    """Only what is needed travels: one piece of one expert, or none, per rank and expert."""
    me, lent = jax.lax.axis_index(axis), plan.lent()
    borrows = (plan.donor == me)[:, None] & lent  # [R, m]: what each rank wants of mine
    gives = (jnp.arange(plan.donor.shape[0]) == plan.donor[me])[:, None] & lent[me][None]  # what I want of each rank
    at = jnp.broadcast_to(jnp.arange(plan.home), lent.shape)
    return exchange(w, jnp.zeros_like(w), at, at, borrows.astype(jnp.int32), gives.astype(jnp.int32), axis)


def _collect(own, lent_gradient, plan: Plan, axis: str):
    """In rounds, so that each donor hears from one borrower at a time: many may have borrowed the same expert."""
    me, lent, R = jax.lax.axis_index(axis), plan.lent(), plan.donor.shape[0]
    at = jnp.broadcast_to(jnp.arange(plan.home), lent.shape)
    turn, rounds = turns(plan)

    def collect(state):
        round, total = state
        now = lent & (turn == round)[:, None]
        send = (jnp.arange(R) == plan.donor[me])[:, None] & now[me][None]
        receive = (plan.donor == me)[:, None] & now
        none = jnp.zeros_like(total)
        part = exchange(lent_gradient, none, at, at, send.astype(jnp.int32), receive.astype(jnp.int32), axis)
        return round + 1, total + part

    # Ranks of other expert groups have plans of their own; all take part in the largest number of rounds.
    rounds = jax.lax.pmax(rounds, tuple(sorted(jax.typeof(rounds).manual_axis_type.varying)))
    start = (jnp.zeros_like(rounds), *vary_alike(own, like=(lent_gradient,)))
    return jax.lax.while_loop(lambda state: state[0] < rounds, collect, start)[1]


def turns(plan: Plan) -> tuple[Int[Array, " R"], Int[Array, ""]]:
    """When each borrower reports to its donor, and how many turns that takes."""
    R = plan.donor.shape[0]
    borrows = plan.lent().any(1)
    same = (plan.donor[:, None] == plan.donor[None]) & borrows[None] & (jnp.arange(R)[None] < jnp.arange(R)[:, None])
    turn = same.sum(1)
    return turn, jnp.max(jnp.where(borrows, turn + 1, 0))
