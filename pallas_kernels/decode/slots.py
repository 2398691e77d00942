"""Where in the caches the rows of a step are: independent sequences, or consecutive tokens of one, and snapshots.

A slot of the caches holds a KDA state (S and the convolutions' history) after one token, and latents by position. The
slots of a sequence hold its states after several tokens: to roll back is to enter from an older one. Latents need one
slot; those of rejected tokens are overwritten by their positions.

sequence = Snapshots(range(8), latent=0)
run(weights, caches, token, position, together(config, sequence.step(6)))   # a token and five drafts, `verify_program`
sequence.accept(3)                                                          # two of the drafts stay
sequence.rollback(2)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.decode.config import DecodeConfig

CHAINED = -1  # in place of an entry: the row goes on from the row before it


class Slots(NamedTuple):
    """Per row of a step: where its KDA state comes from (or CHAINED) and is left, and where its latents are."""

    entry: Int[Array, " B"]
    exit: Int[Array, " B"]
    latent: Int[Array, " B"]


def independent(rows: int) -> Slots:
    """Every row is a sequence of its own, in the slot of its number."""
    return Slots(*[jnp.arange(rows, dtype=jnp.int32)] * 3)


def together(config: DecodeConfig, *parts: Slots) -> Slots:
    """Rows of several sequences in one step, and idle ones behind them, whose positions must be negative.

    Raises ValueError for what the kernel does not check: slots that are not there, two rows that leave their states in
    one, a row that goes on from none or from another sequence.
    """
    entry, exit, latent = (np.concatenate(x).astype(np.int32) for x in zip(*parts, strict=True))
    idle = config.rows - len(entry)
    if idle < 0:
        raise ValueError(f"{len(entry)} rows in a step: expected at most rows = {config.rows}")
    for name, slots, least in (("entry", entry, CHAINED), ("exit", exit, 0), ("latent", latent, 0)):
        if slots.min() < least or slots.max() >= config.cache_slots:
            raise ValueError(
                f"{name} = {slots.tolist()}: expected {least} to {config.cache_slots - 1}, the caches' slots"
            )
    if entry[0] == CHAINED:
        raise ValueError(f"entry = {entry.tolist()}: expected a slot for row 0, which has no row before it")
    if len(np.unique(exit)) < len(exit):
        raise ValueError(f"exit = {exit.tolist()}: expected a slot of its own for every row")
    if np.any((latent[1:] != latent[:-1]) & (entry[1:] == CHAINED)):
        raise ValueError(f"latent = {latent.tolist()}: expected a chained row's to be that of the row before it")
    pad = lambda x, value: np.pad(x, (0, idle), constant_values=value)  # noqa: E731
    return Slots(pad(entry, CHAINED), pad(exit, 0), pad(latent, 0))


@dataclass
class Snapshots:
    """Which slot of one sequence holds its state after how many tokens.

    `tokens` are in the caches, and the next one's position; the state after them is in slots[0] at first. A step of n
    rows leaves n states, in free slots and then in those of the oldest states: these can no longer be rolled back to.
    """

    slots: Sequence[int]
    latent: int
    tokens: int = 0
    _held: dict[int, int] = field(init=False)  # tokens -> slot
    _open: int = field(init=False, default=0)  # rows of the last step, until `accept`

    def __post_init__(self):
        self._held = {self.tokens: self.slots[0]}

    def step(self, count: int) -> Slots:
        """For `count` rows with the next tokens of the sequence. `accept` follows before anything else."""
        self._closed(f"step({count})")
        if not 1 <= count <= len(self.slots):
            raise ValueError(f"step({count}): expected 1 to {len(self.slots)} rows, one for each slot of the sequence")
        entry, taken = self._held[self.tokens], set(self._held.values())
        oldest = [self._held[tokens] for tokens in sorted(self._held)]
        exit = [*(slot for slot in self.slots if slot not in taken), *oldest][:count]
        kept = {tokens: slot for tokens, slot in self._held.items() if slot not in exit}
        self._held = kept | {self.tokens + 1 + row: slot for row, slot in enumerate(exit)}
        self._open = count
        rows = ([entry, *[CHAINED] * (count - 1)], exit, [self.latent] * count)
        return Slots(*(np.array(row, np.int32) for row in rows))

    def accept(self, count: int) -> None:
        """So many rows of the last step stay. Raises ValueError for more than there were, and for none where the last
        step needed all slots."""
        if not 0 <= count <= self._open:
            raise ValueError(f"accept({count}): expected 0 to {self._open}, the rows of the last step")
        self._return_to(self.tokens + count, f"accept({count})")
        self._open = 0

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens. Raises ValueError if no slot holds the state before them."""
        self._closed(f"rollback({count})")
        if count < 0:
            raise ValueError(f"rollback({count}): expected 0 or more tokens")
        self._return_to(self.tokens - count, f"rollback({count})")

    def _closed(self, what: str) -> None:
        if self._open:
            raise ValueError(f"{what}: expected accept(0) to accept({self._open}) for the step before")

    def _return_to(self, tokens: int, what: str) -> None:
        if tokens not in self._held:
            held = ", ".join(map(str, sorted(self._held)))
            raise ValueError(f"{what}: no slot holds the state after {tokens} tokens; they hold those after {held}")
        self._held = {n: slot for n, slot in self._held.items() if n <= tokens}
        self.tokens = tokens
