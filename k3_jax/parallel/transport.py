"""How token rows travel to the ranks that compute them, and back.

S tokens with k chosen experts each make N = S k rows on every rank, before and after. A rank sorts its own choices by
expert (`order`); a transport knows which choice of which rank each row is. One for each situation:

    Local      one rank
    Gathered   every rank reads all tokens of the axis and picks its rows: for few ranks, and for CPUs, which have no
               ragged exchange
    Ragged     only the rows travel, one piece per rank and group of experts, so that they arrive sorted
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax.parallel.expert_plan import Pieces, Plan, pieces, sources
from pallas_kernels.common.dispatch import vary_alike


class Transport(Protocol):
    """`rows` and `column` are linear; `combine` and `column_back` are their transposes."""

    def rows(self, x: Float[Array, "S L"]) -> Float[Array, "N L"]:
        """The token of each row."""
        ...

    def column(self, p: Float[Array, "S k"]) -> Float[Array, " N"]:
        """The number of each row."""
        ...

    def combine(self, y: Float[Array, "N L"]) -> Float[Array, "S L"]:
        """Each token's sum over its k rows, in float32."""
        ...

    def column_back(self, c: Float[Array, " N"]) -> Float[Array, "S k"]:
        """Each row's number where it belongs."""
        ...


def transport(fields: list[str], fixed: list[str]) -> Callable[[type], type]:
    """A frozen dataclass that is a pytree: the backward pass uses the forward's."""
    return lambda cls: jax.tree_util.register_dataclass(dataclass(frozen=True)(cls), fields, fixed)


@transport(["order"], ["k"])
class Local:
    order: Int[Array, " N"]
    k: int

    def rows(self, x):
        return x[self.order // self.k]

    def column(self, p):
        return p.reshape(-1)[self.order]

    def combine(self, y):
        return _unsorted(y, self.order).reshape(-1, self.k, y.shape[1]).sum(1)

    def column_back(self, c):
        return _unsorted(c, self.order).reshape(-1, self.k)


@transport(["choice"], ["k", "axis"])
class Gathered:
    choice: Int[Array, " N"]  # each row's place in the choices of all ranks
    k: int
    axis: str

    @staticmethod
    def of(plan: Plan, order: Int[Array, " N"], k: int, axis: str) -> "Gathered":
        rank, place = sources(plan, jax.lax.axis_index(axis), order.size)
        return Gathered(rank * order.size + jax.lax.all_gather(order, axis)[rank, place], k, axis)

    def rows(self, x):
        return jax.lax.all_gather(x, self.axis, tiled=True)[self.choice // self.k]

    def column(self, p):
        return jax.lax.all_gather(p.reshape(-1), self.axis, tiled=True)[self.choice]

    def combine(self, y):
        tokens = self.choice.size // self.k * jax.lax.axis_size(self.axis)
        return self._sum(jnp.zeros((tokens, y.shape[1]), jnp.float32), self.choice // self.k, y)

    def column_back(self, c):
        everyone = self.choice.size * jax.lax.axis_size(self.axis)
        return self._sum(jnp.zeros(everyone, c.dtype), self.choice, c).reshape(-1, self.k)

    def _sum(self, zeros, index, x):
        zeros, index, x = vary_alike(zeros, index, x)
        return jax.lax.psum_scatter(zeros.at[index].add(x), self.axis, tiled=True)


@transport(["order", "sent", "received"], ["k", "axis", "wire"])
class Ragged:
    order: Int[Array, " N"]
    sent: Pieces  # per destination, [R, 2m]
    received: Pieces  # per source, [R, 2m]
    k: int
    axis: str
    wire: jnp.dtype  # of the rows that go back

    @staticmethod
    def of(plan: Plan, order: Int[Array, " N"], k: int, axis: str, wire: DTypeLike) -> "Ragged":
        ranks = jnp.arange(jax.lax.axis_size(axis))
        me = jnp.full_like(ranks, jax.lax.axis_index(axis))
        return Ragged(order, pieces(plan, me, ranks), pieces(plan, ranks, me), k, axis, jnp.dtype(wire))

    def rows(self, x):
        return self._there(x[self.order // self.k])

    def column(self, p):
        return self._there(p.reshape(-1)[self.order])

    def combine(self, y):
        back = _unsorted(self._back(y.astype(self.wire)), self.order).reshape(-1, self.k, y.shape[1])
        return back.astype(jnp.float32).sum(1)

    def column_back(self, c):
        return _unsorted(self._back(c), self.order).reshape(-1, self.k)

    def _there(self, x):
        return exchange(x, self.sent.source, self.sent.destination, self.sent.size, self.received.size, self.axis)

    def _back(self, x):
        """A row's place on the rank that it came from is known here, from the plan."""
        mine, theirs = self.received, self.sent
        return exchange(x, mine.destination, mine.source, mine.size, theirs.size, self.axis)


def exchange(x, at, there, send, receive, axis: str) -> Array:
    """Pieces [R, n] of `send` rows of x from `at`, written from `there` on the other side; as many rows as in x."""
    x, out = vary_alike(x, jnp.zeros_like(x))
    flat = (piece.reshape(-1) for piece in (at, send, there, receive))
    return jax.lax.ragged_all_to_all(x, out, *flat, axis_name=axis)


def _unsorted(x, order):
    return jnp.zeros_like(x).at[order].set(x, unique_indices=True)
