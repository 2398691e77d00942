"""How token rows travel to the ranks that compute them, and back.

S tokens with k chosen experts each make N = S k rows on every rank, before and after. A rank sorts its own choices by
expert (`order`); a transport knows which choice of which rank each row is. One for each situation:

    Local      one rank
    Gathered   every rank reads all tokens of the axis and picks its rows: for few ranks, and for CPUs, which have no
               ragged exchange
    Ragged     only the rows travel, one piece per rank and group of experts, so that they arrive sorted

Rows come in chunks of equal size, runs of the rank's rows: while one chunk travels another is computed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax.parallel.expert_plan import Pieces, Plan, pieces, sources
from pallas_kernels.common.dispatch import vary_alike

# Runs of a rank's rows that travel one after the other.
CHUNKS = 4


class Transport(Protocol):
    """The way there is `depart`, then `arrive` for each chunk; the way back `give` for each chunk, then `combine`: its
    transpose. `column` and `column_back` are the same for one number per row."""

    @property
    def chunks(self) -> int: ...

    def depart(self, x: Float[Array, "S L"]) -> Float[Array, "M L"]:
        """The tokens made ready for `arrive`."""
        ...

    def arrive(self, departed: Float[Array, "M L"], chunk: int) -> Float[Array, "n L"]:
        """The token of each row of a chunk."""
        ...

    def column(self, p: Float[Array, "S k"]) -> Float[Array, " N"]:
        """The number of each row."""
        ...

    def give(self, returned: Array | None, y: Float[Array, "n L"], chunk: int) -> Array:
        """What has come back, with the rows of one more chunk; None: nothing yet."""
        ...

    def combine(self, returned: Array) -> Float[Array, "S L"]:
        """Each token's sum over its k rows, in float32."""
        ...

    def column_back(self, c: Float[Array, " N"]) -> Float[Array, "S k"]:
        """Each row's number where it belongs."""
        ...


def pytree_dataclass(fields: list[str], fixed: list[str]) -> Callable[[type], type]:
    """A frozen dataclass that is a pytree: the backward pass uses the forward's."""
    return lambda cls: jax.tree_util.register_dataclass(dataclass(frozen=True)(cls), fields, fixed)


@pytree_dataclass(["order", "inverse"], ["k"])
class Local:
    order: Int[Array, " N"]
    inverse: Int[Array, " N"]
    k: int
    chunks = 1

    def depart(self, x):
        return x

    def arrive(self, departed, chunk):
        return departed[self.order // self.k]

    def column(self, p):
        return p.reshape(-1)[self.order]

    def give(self, returned, y, chunk):
        return y

    def combine(self, returned):
        return returned[self.inverse].reshape(-1, self.k, returned.shape[1]).sum(1)

    def column_back(self, c):
        return c[self.inverse].reshape(-1, self.k)


@pytree_dataclass(["choice"], ["k", "axis"])
class Gathered:
    choice: Int[Array, " N"]  # each row's place in the choices of all ranks
    k: int
    axis: str
    chunks = 1

    @staticmethod
    def of(plan: Plan, order: Int[Array, " N"], k: int, axis: str) -> "Gathered":
        rank, place = sources(plan, jax.lax.axis_index(axis), order.size)
        return Gathered(rank * order.size + jax.lax.all_gather(order, axis)[rank, place], k, axis)

    def depart(self, x):
        return jax.lax.all_gather(x, self.axis, tiled=True)

    def arrive(self, departed, chunk):
        return departed[self.choice // self.k]

    def column(self, p):
        return jax.lax.all_gather(p.reshape(-1), self.axis, tiled=True)[self.choice]

    def give(self, returned, y, chunk):
        return y

    def combine(self, returned):
        tokens = self.choice.size // self.k * jax.lax.axis_size(self.axis)
        return self._sum(jnp.zeros((tokens, returned.shape[1]), jnp.float32), self.choice // self.k, returned)

    def column_back(self, c):
        everyone = self.choice.size * jax.lax.axis_size(self.axis)
        return self._sum(jnp.zeros(everyone, c.dtype), self.choice, c).reshape(-1, self.k)

    def _sum(self, zeros, index, x):
        zeros, index, x = vary_alike(zeros, index, x)
        return jax.lax.psum_scatter(zeros.at[index].add(x), self.axis, tiled=True)


@pytree_dataclass(["order", "inverse", "sent", "received"], ["k", "axis", "wire"])
class Ragged:
    order: Int[Array, " N"]
    inverse: Int[Array, " N"]
    sent: Pieces  # per destination, [R, G]
    received: Pieces  # per source, [R, G]
    k: int
    axis: str
    wire: jnp.dtype  # of the rows that go back

    @staticmethod
    def of(plan: Plan, order, inverse, k: int, axis: str, wire: DTypeLike) -> "Ragged":
        ranks = jnp.arange(jax.lax.axis_size(axis))
        me = jnp.full_like(ranks, jax.lax.axis_index(axis))
        return Ragged(order, inverse, pieces(plan, me, ranks), pieces(plan, ranks, me), k, axis, jnp.dtype(wire))

    @property
    def chunks(self) -> int:
        return math.gcd(CHUNKS, self.order.size)

    def depart(self, x):
        return x[self.order // self.k]

    def arrive(self, departed, chunk):
        n = self.order.size // self.chunks
        return self._there(departed, chunk * n, n)

    def column(self, p):
        return self._there(p.reshape(-1)[self.order], 0, self.order.size)

    def give(self, returned, y, chunk):
        return self._back(returned, y.astype(self.wire), chunk * y.shape[0])

    def combine(self, returned):
        rows = returned[self.inverse].reshape(-1, self.k, returned.shape[1])
        return rows.astype(jnp.float32).sum(1)

    def column_back(self, c):
        return self._back(None, c, 0)[self.inverse].reshape(-1, self.k)

    def _there(self, x, start: int, rows: int):
        """The rows from `start` on that arrive here."""
        mine, theirs = (part(x, start, start + rows) for x in (self.sent, self.received))
        out = jax.lax.empty((rows, *x.shape[1:]), x.dtype)
        return exchange(x, out, mine.source, mine.destination, mine.size, theirs.size, self.axis)

    def _back(self, returned, x, start: int):
        """The rows from `start` on go where they came from. Where that is is known here, from the plan."""
        mine, theirs = (part(whole, start, start + x.shape[0]) for whole in (self.received, self.sent))
        out = jax.lax.empty((self.order.size, *x.shape[1:]), x.dtype) if returned is None else returned
        return exchange(x, out, mine.destination, mine.source, mine.size, theirs.size, self.axis)


def part(x: Pieces, start: int, stop: int) -> Pieces:
    """What of the pieces falls on the destination's rows from `start` to `stop`, counted from `start`."""
    low = jnp.maximum(x.destination, start)
    size = jnp.maximum(jnp.minimum(x.destination + x.size, stop) - low, 0)
    return Pieces(size, jnp.where(size > 0, x.source + low - x.destination, 0), jnp.where(size > 0, low - start, 0))


def exchange(x, out, at, there, send, receive, axis: str) -> Array:
    """Pieces [R, n] of `send` rows of x from `at`, written from `there` into `out` on the other side."""
    x, out = vary_alike(x, out)
    flat = (piece.reshape(-1) for piece in (at, send, there, receive))
    return jax.lax.ragged_all_to_all(x, out, *flat, axis_name=axis)
