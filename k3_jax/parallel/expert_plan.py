"""Which rank computes which token rows: every rank exactly the same number, whatever the router chose.

R ranks hold m = E / R experts each at home, and G = 2 m with those they borrow. A rank with too few rows borrows from
one other rank, its donor, and computes a share of the rows of the donor's experts (report §5.2.1, Appendix E).
`docs/parallelism.md` proves that one donor is enough, so m borrowed experts are. All of it is integer arithmetic on the
counts, the same on every rank: nothing goes to the host.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.common.dispatch import vary_alike


class Plan(NamedTuple):
    """The rows of one expert stand in order of their source rank, then of their place there; ranks take runs of them,
    the first rank the first."""

    counts: Int[Array, "R E"]  # rows of expert e that start on rank s
    share: Int[Array, "R E"]  # rows of expert e that rank r computes
    donor: Int[Array, " R"]  # whose experts rank r borrows; its own number: nobody's

    @property
    def home(self) -> int:
        """m, the experts at home on each rank."""
        R, E = self.counts.shape
        return E // R

    def lent(self) -> Bool[Array, "R m"]:
        """Which of its donor's experts each rank needs a copy of."""
        R, m = self.donor.shape[0], self.home
        share = jnp.take_along_axis(self.share.reshape(R, R, m), self.donor[:, None, None], axis=1)[:, 0]
        return (share > 0) & (self.donor != jnp.arange(R))[:, None]

    def groups(self) -> tuple[Int[Array, "R G"], Int[Array, "R G"]]:
        """The experts in each rank's groups of rows, its own and then its donor's, and the rows of each group."""
        R, m = self.donor.shape[0], self.home
        owners = jnp.stack([jnp.arange(R), self.donor], axis=1)
        experts = (owners[..., None] * m + jnp.arange(m)[None, None]).reshape(R, 2 * m)
        rows = jnp.take_along_axis(self.share, experts, axis=1)
        wanted = jnp.concatenate([jnp.ones((R, m), bool), self.lent()], axis=1)
        return experts, jnp.where(wanted, rows, 0)


def make_plan(counts: Int[Array, "R E"]) -> Plan:
    """The counts' columns must add up to the same number for every source rank; E must be a multiple of R."""
    R, E = counts.shape
    load = counts.sum(0).reshape(R, E // R)
    donor, need = _donors(load.sum(1) - counts[0].sum())
    moved = _moves(load, jnp.where(donor[None] == jnp.arange(R)[:, None], need[None], 0))
    stay = load - moved.sum(2)
    at_home = jnp.arange(E)[None] // (E // R) == jnp.arange(R)[:, None]
    share = moved.reshape(E, R).T + jnp.where(at_home, stay.reshape(1, E), 0)
    return Plan(counts, share, donor)


def _donors(surplus: Int[Array, " R"]) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Each rank's donor and the rows it gets: the poorest rank is filled by the richest, until none is poor.

    A donor may become poor itself; a rank that was filled stays as it is, so there are at most R - 1 rounds.
    """

    def fill(state):
        surplus, donor, need = state
        rich, poor = jnp.argmax(surplus), jnp.argmin(surplus)
        missing = -surplus[poor]
        return surplus.at[rich].add(-missing).at[poor].set(0), donor.at[poor].set(rich), need.at[poor].set(missing)

    start = vary_alike(surplus, jnp.arange(surplus.shape[0]), jnp.zeros_like(surplus))
    return jax.lax.while_loop(lambda state: (state[0] < 0).any(), fill, start)[1:]


def _moves(load: Int[Array, "R m"], want: Int[Array, "R R"]) -> Int[Array, "R m R"]:
    """Rows of each donor's experts that go to each rank: the fullest expert serves the largest want, all donors at
    once. Each round finishes an expert or a want of every donor that is not done."""
    R = load.shape[0]
    donors = jnp.arange(R)

    def move(state):
        left, want, moved = state
        expert, rank = jnp.argmax(left, axis=1), jnp.argmax(want, axis=1)
        rows = jnp.minimum(left[donors, expert], want[donors, rank])
        return (
            left.at[donors, expert].add(-rows),
            want.at[donors, rank].add(-rows),
            moved.at[donors, expert, rank].add(rows),
        )

    start = vary_alike(load, want, jnp.zeros((*load.shape, R), load.dtype))
    return jax.lax.while_loop(lambda state: (state[1] > 0).any(), move, start)[2]


class Pieces(NamedTuple):
    """What goes from one rank to another, per group of the destination."""

    size: Int[Array, "*p G"]  # rows
    source: Int[Array, "*p G"]  # the first one's place among the source's rows, which are sorted by expert
    destination: Int[Array, "*p G"]  # the first one's place among the destination's rows


def pieces(plan: Plan, src: Int[Array, "*p"], dst: Int[Array, "*p"]) -> Pieces:
    experts, rows = plan.groups()
    e = experts[dst]
    at = lambda table, rank: table[rank[..., None], e]  # noqa: E731
    before, first = _before(plan.counts, 0), _before(plan.share, 0)
    low = jnp.maximum(at(before, src), at(first, dst))
    high = jnp.minimum(at(before + plan.counts, src), at(first + plan.share, dst))
    size = jnp.where(rows[dst] > 0, jnp.maximum(high - low, 0), 0)
    return Pieces(
        size=size,
        source=at(_before(plan.counts, 1), src) + low - at(before, src),
        destination=_before(rows, 1)[dst] + low - at(first, dst),
    )


def sources(plan: Plan, rank: Int[Array, ""], rows: int) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """Of each of a rank's rows: its source rank, and its place among the rows there, which are sorted by expert."""
    experts, sizes = plan.groups()
    experts, sizes, row = experts[rank], sizes[rank], jnp.arange(rows)
    group = jnp.searchsorted(jnp.cumsum(sizes), row, side="right").clip(0, sizes.shape[0] - 1)
    e = experts[group]
    ordinal = row - _before(sizes, 0)[group] + _before(plan.share, 0)[rank, e]
    before = _before(plan.counts, 0)
    src = jnp.sum(ordinal[None] >= (before + plan.counts)[:, e], axis=0)
    return src, _before(plan.counts, 1)[src, e] + ordinal - before[src, e]


def _before(x: Array, axis: int) -> Array:
    """Sum of all earlier entries."""
    return jnp.cumsum(x, axis=axis) - x
