"""Which layers are stacked together, so that layers of one kind share a traced body.

The unit is the mixer period: K3's 93 layers are `layer 0 | 1, 2 | 22 x (MLA, 3 KDA) | 91, 92`, found from the layer
lists for any configuration. On a pipeline the layers are first cut into chunks of whole AttnRes blocks, one or more to
each rank. All ranks run one program, so chunks share a pattern of slots, and a slot that a chunk has no layer for is
skipped: K3's eight chunks are all `dense KDA | 3 x (3 KDA, MLA)`, of which the first lacks one KDA, the others the
dense layer, and the last, with nine layers, ends with the MLA of its third group alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from k3_jax.config import ConfigError, K3Config
from k3_jax.nn.block import Kind, kind


@dataclass(frozen=True)
class Group:
    """`repeat` times the runs (kind, count) one after another, from slot `first` on."""

    first: int
    repeat: int
    runs: tuple[tuple[Kind, int], ...]

    @property
    def num_slots(self) -> int:
        return self.repeat * sum(count for _, count in self.runs)

    def slots(self, run: int) -> np.ndarray:
        """Slot numbers of a run, [repeat, count]."""
        period = sum(count for _, count in self.runs)
        offset = sum(count for _, count in self.runs[:run])
        starts = self.first + offset + period * np.arange(self.repeat)
        return (starts[:, None] + np.arange(self.runs[run][1])[None]).astype(np.int32)


@dataclass(frozen=True)
class Depth:
    """How the layers of `config` are stacked on a pipeline of `pipe` ranks with `interleave` chunks each.

    Chunk number `pipe * v + p` is the v-th of rank p. Raises ConfigError for more chunks than AttnRes blocks.
    """

    config: K3Config
    pipe: int = 1
    interleave: int = 1

    def __post_init__(self):
        blocks = self.config.num_attn_res_blocks
        if self.pipe * self.interleave > blocks:
            raise ConfigError(
                f"mesh.pipe x mesh.interleave = {self.pipe} x {self.interleave}: expected at most {blocks} chunks, the "
                f"AttnRes blocks of {self.config.num_layers} layers"
            )

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes of a stack in front of [repeat, count]."""
        return (self.pipe, self.interleave) if self.pipe > 1 else ()

    @cached_property
    def chunks(self) -> tuple[range, ...]:
        """The layers of each chunk."""
        config, S = self.config, self.config.attn_res_block
        blocks = [range(i, min(i + S, config.num_layers)) for i in range(0, config.num_layers, S)]
        costs = [sum(layer_cost(config, layer) for layer in block) for block in blocks]
        costs[-1] += config.hidden_size * config.vocab_size  # the head
        parts = cut(costs, self.pipe * self.interleave)
        return tuple(range(blocks[part[0]].start, blocks[part[-1]].stop) for part in parts)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        pattern: list[Kind] = []
        for chunk in self.chunks:
            pattern = shortest_common(pattern, [kind(self.config, layer) for layer in chunk])
        return fold(pattern)

    @cached_property
    def numbers(self) -> list[list[np.ndarray]]:
        """Per group and run the layer in each place of the stack, [*lead, repeat, count]; -1 in a slot to skip."""
        pattern = [k for g in self.groups for _ in range(g.repeat) for k, count in g.runs for _ in range(count)]
        table = np.stack([self._place(chunk, pattern) for chunk in self.chunks])
        table = np.moveaxis(table.reshape(self.interleave, self.pipe, -1), 1, 0)
        table = table.reshape(*self.lead, -1)
        return [[table[..., group.slots(run)] for run in range(len(group.runs))] for group in self.groups]

    @property
    def gaps(self) -> list[list[bool]]:
        """Per group and run whether some chunk lacks a layer there."""
        return [[bool((numbers < 0).any()) for numbers in runs] for runs in self.numbers]

    def _place(self, chunk: range, pattern: Sequence[Kind]) -> np.ndarray:
        """The layer in each slot: every layer takes the first slot of its kind that is left."""
        row, slot = np.full(len(pattern), -1, np.int32), 0
        for layer in chunk:
            while pattern[slot] != kind(self.config, layer):
                slot += 1
            row[slot], slot = layer, slot + 1
        return row

    def first_rows(self) -> tuple[int, ...]:
        """Per chunk the row of the AttnRes bank that its input is: as many rows stand before it."""
        return tuple(chunk.start // self.config.attn_res_block for chunk in self.chunks)


def fold(pattern: Sequence[Kind]) -> tuple[Group, ...]:
    """Run-length encode the kinds, then fold a pair of runs that repeats."""
    runs: list[tuple[Kind, int]] = []
    for k in pattern:
        if runs and runs[-1][0] == k:
            runs[-1] = (k, runs[-1][1] + 1)
        else:
            runs.append((k, 1))
    groups, first, i = [], 0, 0
    while i < len(runs):
        pair, repeat = runs[i : i + 2], 1
        while len(pair) == 2 and runs[i + 2 * repeat : i + 2 * repeat + 2] == pair:
            repeat += 1
        group = Group(first, repeat, tuple(pair)) if repeat > 1 else Group(first, 1, (runs[i],))
        groups.append(group)
        first, i = first + group.num_slots, i + len(group.runs) * group.repeat
    return tuple(groups)


def shortest_common(a: Sequence, b: Sequence) -> list:
    """A shortest sequence that holds both in their order."""
    best = np.zeros((len(a) + 1, len(b) + 1), int)  # lengths for the suffixes a[i:], b[j:]
    best[:, -1], best[-1, :] = range(len(a), -1, -1), range(len(b), -1, -1)
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            shared = a[i] == b[j]
            best[i, j] = 1 + (best[i + 1, j + 1] if shared else min(best[i + 1, j], best[i, j + 1]))
    merged, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        shared, take_a = a[i] == b[j], a[i] == b[j] or best[i + 1, j] <= best[i, j + 1]
        merged.append(a[i] if take_a else b[j])
        i, j = i + take_a, j + (shared or not take_a)
    return [*merged, *a[i:], *b[j:]]


def cut(costs: Sequence[int], parts: int) -> list[range]:
    """`parts` ranges of neighbours, of which the most expensive is as cheap as can be."""
    total = np.concatenate([[0], np.cumsum(costs)])
    ends = {0: (0, [])}  # of the blocks cut so far -> (most expensive range, the ranges)
    for _ in range(parts):
        longer: dict = {}
        for start, (most, ranges) in ends.items():
            for end in range(start + 1, len(costs) + 1):
                option = (max(most, total[end] - total[start]), [*ranges, range(start, end)])
                longer[end] = min(longer.get(end, option), option, key=lambda x: x[0])
        ends = longer
    return ends[len(costs)][1]


def layer_cost(config: K3Config, layer: int) -> int:
    """Weights that one token multiplies with. What grows with the sequence is left out: it is the same in all chunks
    but for MLA's share."""
    D, kda, mla, moe = config.hidden_size, config.kda, config.mla, config.moe
    if config.is_mla(layer):
        H, V, C = mla.num_heads, mla.v_head_dim, mla.kv_lora_rank
        query = mla.q_lora_rank * (D + H * mla.qk_head_dim)
        mixer = query + D * mla.cache_dim + C * H * (mla.qk_nope_head_dim + V) + 2 * D * H * V
    else:
        mixer = 5 * D * kda.num_heads * kda.head_dim
    if not config.is_moe(layer):
        return mixer + 3 * D * config.dense_dim
    routed = moe.top_k * 3 * moe.latent_dim * moe.expert_dim
    return mixer + D * moe.num_experts + 2 * D * moe.latent_dim + 3 * D * moe.shared_dim + routed
