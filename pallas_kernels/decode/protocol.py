"""Static check of the step's synchronisation over all ranks: what the interpreter cannot see, before anything runs.

    play(trace(plan, position=(0,)))       raises ProtocolError

Every rank's events (`follow`) are played against each other. Copies arrive at once: what hangs here hangs everywhere.
Who knows what is kept in vector clocks: a rank learns what another one had done when it awaits its signal or its copy.

Found are: a wait that nothing ends, also one that hangs in a circle; bytes or signals that nobody awaits; a remote copy
to a rank that may not have entered the kernel; a place that is used while a copy to it, or written while one from it,
is on its way; a remote copy to a place that its owner may still read. All ranks run one program, hence one
`collective_id`.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode.call import AXIS
from pallas_kernels.decode.follow import Access, Event, Place, Ref, Signal, Start, Wait, follow
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.slots import Slots, independent
from pallas_kernels.decode.step import decode_step


class ProtocolError(AssertionError):
    """What is wrong, on which rank, at which event."""


def trace(plan: Plan, position: tuple[int, ...], slots: Slots | None = None) -> list[list[Event]]:
    """Each rank's events in one step with rows at these positions, in these slots (independent ones)."""
    c = plan.config
    slots = independent(c.rows) if slots is None else slots
    rows = jax.ShapeDtypeStruct((c.rows,), jnp.int32)
    make = jax.make_jaxpr(partial(decode_step, plan), axis_env=[(AXIS, c.ranks)])
    jaxpr = make(rows, rows, Slots(rows, rows, rows), plan.weights, plan.caches)
    (call,) = (e for e in jaxpr.eqns if e.primitive.name == "pallas_call")
    kernel = call.params["jaxpr"]
    scalars = (plan.layer_table, [0] * c.rows, position, *slots)
    contents = dict(enumerate(map(np.array, scalars)))
    refs = [Ref(i, x.aval, contents.get(i)) for i, x in enumerate(kernel.invars)]
    return [follow(kernel, refs, rank) for rank in range(c.ranks)]


@dataclass
class _Flight:
    """A copy on its way; `source` and `target` are (rank, place)."""

    source: tuple[int, Place]
    target: tuple[int, Place]
    pending: int  # of the ends that are awaited: what is sent, what arrives


@dataclass
class _Semaphore:
    """What has come and was not awaited: (bytes left, the sender's clock, the flight)."""

    items: deque = field(default_factory=deque)

    @property
    def count(self) -> int:
        return sum(item[0] for item in self.items)


class _Play:
    def __init__(self, events: list[list[Event]]):
        self.events, self.ranks = events, len(events)
        self.at = [0] * self.ranks
        self.clocks = np.zeros((self.ranks, self.ranks), int)
        self.semaphores: dict = defaultdict(_Semaphore)
        self.writing: dict = defaultdict(list)  # (rank, buffer) -> places that a copy is on its way to
        self.reading: dict = defaultdict(list)  # (rank, buffer) -> places that a copy is on its way from
        self.used: dict = defaultdict(dict)  # (rank, buffer) -> place -> when the owner used it last

    def run(self) -> None:
        while any(self.at[rank] < len(events) for rank, events in enumerate(self.events)):
            if not any([self.advance(rank) for rank in range(self.ranks)]):
                self.fail_stuck()
        left = {(rank, *name): s.count for (rank, name), s in self.semaphores.items() if s.count}
        if left:
            raise ProtocolError(f"semaphores that nobody awaits, by (rank, semaphore): {left}")

    def advance(self, rank: int) -> bool:
        """Play one rank until it waits in vain; whether it did anything."""
        start = self.at[rank]
        while self.at[rank] < len(self.events[rank]):
            event = self.events[rank][self.at[rank]]
            if isinstance(event, Wait) and self.semaphores[rank, event.semaphore].count < event.size:
                break
            self.clocks[rank, rank] = self.at[rank] + 1
            getattr(self, type(event).__name__.lower())(rank, event)
            self.at[rank] += 1
        return self.at[rank] > start

    def fail(self, rank: int, what: str) -> None:
        raise ProtocolError(f"rank {rank}, event {self.at[rank]} {self.events[rank][self.at[rank]]}: {what}")

    def fail_stuck(self) -> None:
        stuck = {
            rank: self.events[rank][self.at[rank]]
            for rank in range(self.ranks)
            if self.at[rank] < len(self.events[rank])
        }
        raise ProtocolError(f"all wait for ever, by rank: {stuck}")

    def access(self, rank: int, event: Access) -> None:
        place = event.place
        if any(place.meets(other) for other in self.writing[rank, place.buffer]):
            self.fail(rank, "used while a copy to it is on its way")
        if event.writes and any(place.meets(other) for other in self.reading[rank, place.buffer]):
            self.fail(rank, "written while a copy from it is on its way")
        self.used[rank, place.buffer][place] = self.at[rank] + 1

    def signal(self, rank: int, event: Signal) -> None:
        self.semaphores[event.peer, event.semaphore].items.append([event.size, self.clocks[rank].copy(), None])

    def wait(self, rank: int, event: Wait) -> None:
        left, items = event.size, self.semaphores[rank, event.semaphore].items
        while left:
            taken = min(left, items[0][0])
            items[0][0] -= taken
            left -= taken
            np.maximum(self.clocks[rank], items[0][1], out=self.clocks[rank])
            if not items[0][0]:
                self.land(items.popleft()[2], rank)

    def land(self, flight, rank: int) -> None:
        """An end of a copy has been awaited."""
        if flight is None:
            return
        flight, arrives = flight
        owner, place = flight.target if arrives else flight.source
        (self.writing if arrives else self.reading)[owner, place.buffer].remove(place)
        if not arrives and flight.source[0] == flight.target[0]:
            raise AssertionError("a local copy has one semaphore")
        if arrives and flight.source[0] == flight.target[0]:
            self.reading[flight.source[0], flight.source[1].buffer].remove(flight.source[1])

    def start(self, rank: int, event: Start) -> None:
        peer = rank if event.peer is None else event.peer
        if self.clocks[rank, peer] == 0:
            self.fail(rank, f"rank {peer} may not have entered the kernel")
        self.access(rank, Access(event.source, False))
        if peer == rank:
            self.access(rank, Access(event.target, True))
        else:
            self.check_free(rank, peer, event.target)
        flight = _Flight((rank, event.source), (peer, event.target), 1)
        self.reading[rank, event.source.buffer].append(event.source)
        self.writing[peer, event.target.buffer].append(event.target)
        clock = self.clocks[rank].copy()
        self.semaphores[peer, event.arrived].items.append([event.size, clock, (flight, True)])
        if event.sent is not None:
            self.semaphores[rank, event.sent].items.append([event.size, clock, (flight, False)])

    def check_free(self, rank: int, peer: int, target: Place) -> None:
        if any(target.meets(other) for other in self.writing[peer, target.buffer]):
            self.fail(rank, "another copy to it is on its way")
        late = [t for place, t in self.used[peer, target.buffer].items() if place.meets(target)]
        if max(late, default=0) > self.clocks[rank, peer]:
            self.fail(rank, f"rank {peer} may still use it")


def play(events: list[list[Event]]) -> None:
    """Raises ProtocolError where the ranks' events do not fit together."""
    _Play(events).run()
