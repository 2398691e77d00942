"""Exchanges between the ranks: remote copies from VMEM to VMEM, without a barrier in between.

A buffer has a place for every rank. Rank n fills place n of its own and copies it to place n of all others. A rank
that sends its part of exchange e + 2 has finished e + 1, to which every other rank contributed after it had read what
it got in e. So a buffer may be used again two exchanges later; `protocol.play` holds the program to that. Nothing else
waits.

Sums run over the places in their order and are the same to the last bit on all ranks.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.core import F32, joined, pad_lanes
from pallas_kernels.decode.plan import Plan


@dataclass(frozen=True)
class Links:
    """`send` and `receive` hold one DMA semaphore per exchange of the plan."""

    plan: Plan
    rank: object
    buffers: SimpleNamespace
    send: object
    receive: object

    @property
    def ranks(self) -> int:
        return self.plan.config.ranks

    def barrier(self) -> None:
        """All ranks have started, and their buffers are free."""
        semaphore = pltpu.get_barrier_semaphore()
        self._each(lambda peer: pl.semaphore_signal(semaphore, inc=1, device_id=(peer,)))
        pl.semaphore_wait(semaphore, self.ranks - 1)

    def _each(self, act) -> None:
        for offset in range(1, self.ranks):  # not a loop: its steps would stand one after the other
            peer = self.rank + offset
            act(jnp.where(peer < self.ranks, peer, peer - self.ranks))

    def _copy(self, name: str, peer):
        buffer, number = getattr(self.buffers, name), self._number(name)
        source = self.ranks + peer if self.plan.exchanges[name].to_each else self.rank
        return pltpu.make_async_remote_copy(
            buffer.at[source],
            buffer.at[self.rank],
            self.send.at[number],
            self.receive.at[number],
            device_id=(peer,),
        )

    def _number(self, name: str) -> int:
        return list(self.plan.exchanges).index(name)

    def start(self, name: str, part) -> None:
        """Send this rank's part [rows, lanes] to all."""
        getattr(self.buffers, name)[self.rank] = part
        self._each(lambda peer: self._copy(name, peer).start())

    def start_padded(self, name: str, part) -> None:
        """Likewise of fewer lanes."""
        self.start(name, pad_lanes(part, self.plan.exchanges[name].shape[1]))

    def start_each(self, name: str, parts: list) -> None:
        """Send part n [rows, lanes] to rank n."""
        buffer = getattr(self.buffers, name)
        for peer, part in enumerate(parts):
            buffer[self.ranks + peer] = part
        buffer[self.rank] = buffer[self.ranks + self.rank]
        self._each(lambda peer: self._copy(name, peer).start())

    def finish(self, name: str):
        """Wait for what all others sent (and until the own part has left): the buffer [ranks, rows, lanes].

        Semaphores count bytes: one wait for as many as all other ranks send, in whatever order they come.
        """
        buffer = getattr(self.buffers, name)
        others = buffer.at[pl.ds(0, self.ranks - 1)]
        for semaphores in (self.send, self.receive):
            pltpu.make_async_copy(others, others, semaphores.at[self._number(name)]).wait()
        return buffer

    def gathered(self, name: str, width: int, lane: int = 0):
        """Finished parts side by side [rows, ranks * width]: lanes [lane, lane + width) of each."""
        buffer = getattr(self.buffers, name)
        return jnp.concatenate([buffer[n, :, lane : lane + width] for n in range(self.ranks)], axis=1)

    def whole(self, name: str, size: int):
        """A finished vector [rows, size] of which every rank has its `columns`."""
        buffer, width = getattr(self.buffers, name), self.plan.config.columns(size)
        return joined([buffer[n, :, : min(width, size - n * width)] for n in range(-(-size // width))], 1)

    def start_sum(self, name: str, part) -> None:
        """Send a partial sum [B, D], rounded: to all, or to each its slice."""
        part, slices = part.astype(self.plan.config.dtype), f"{name}_slices"
        if slices not in self.plan.exchanges:
            self.start(name, halves(part))
            return
        lanes = self.plan.exchanges[slices].shape[1]
        part = pad_lanes(part, lanes * self.ranks)
        self.start_each(slices, [part[:, n * lanes : (n + 1) * lanes] for n in range(self.ranks)])

    def finish_sum(self, name: str, width: int):
        """The sum [B, width] of all ranks' parts, in float32."""
        slices, total = f"{name}_slices", f"{name}_total"
        if slices not in self.plan.exchanges:
            return unhalved(self._added(self.finish(name)))
        self.start(total, self._added(self.finish(slices)))
        self.finish(total)
        return self.whole(total, width)

    def _added(self, buffer):
        return sum((buffer[n].astype(F32) for n in range(1, self.ranks)), buffer[0].astype(F32))


def halves(x):
    """[B, D] -> [2 B, D / 2]: the left halves of the rows, then the right ones. One bfloat16 row alone would waste half
    of every word."""
    middle = x.shape[1] // 2
    return jnp.concatenate([x[:, :middle], x[:, middle:]], axis=0)


def unhalved(x):
    B = x.shape[0] // 2
    return jnp.concatenate([x[:B], x[B:]], axis=1)
