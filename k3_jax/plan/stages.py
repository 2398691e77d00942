"""What each rank of a pipeline has of the model, and how often it runs it. Without a pipeline one rank has all."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from k3_jax.config import RunConfig
from k3_jax.nn.grouping import Depth, layer_cost
from k3_jax.nn.layout import leaf_names
from k3_jax.nn.transformer import K3
from k3_jax.parallel.schedule import Schedule
from k3_jax.train.pipeline import schedule_of

Place = tuple[int, int]  # group and run of a stack


@dataclass(frozen=True)
class Stages:
    """The chunks of a run, and their timetable."""

    depth: Depth
    micro_batches: int

    @staticmethod
    def of(run: RunConfig) -> "Stages":
        return Stages(Depth(run.model, run.mesh.pipe, run.mesh.interleave), run.train.grad_accumulation)

    @property
    def schedule(self) -> Schedule | None:
        """None without a pipeline."""
        return schedule_of(self.depth, self.micro_batches) if self.depth.pipe > 1 else None

    @property
    def bubble(self) -> float:
        return float(self.schedule.bubble()) if self.schedule else 0.0

    def forward_passes(self, chunk: int) -> int:
        """Of a micro-batch through a chunk: its own, and the recomputation of each layer in the backward pass. Before
        that a pipeline runs the chunk again from the rows in the pool, which is the only time that the last one runs
        (train/pipeline.py)."""
        return 3 if chunk < len(self.depth.chunks) - 1 else 2

    def _costs(self) -> list[int]:
        """Of one forward pass through each chunk."""
        return [sum(layer_cost(self.depth.config, layer) for layer in chunk) for chunk in self.depth.chunks]

    @property
    def mean_forward_passes(self) -> float:
        costs = self._costs()
        return sum(self.forward_passes(chunk) * cost for chunk, cost in enumerate(costs)) / sum(costs)

    @property
    def imbalance(self) -> float:
        """What the most expensive chunk costs, over the mean: in each tick all ranks wait for it. A backward pass is
        two forward ones; the head, in the last chunk, runs forward twice."""
        costs = [(2 + self.forward_passes(chunk)) * cost for chunk, cost in enumerate(self._costs())]
        costs[-1] += 4 * self.depth.config.hidden_size * self.depth.config.vocab_size
        return max(costs) * len(costs) / sum(costs)

    def ranks(self) -> list["Rank"]:
        return [Rank(self, number) for number in range(self.depth.pipe)]


@dataclass(frozen=True)
class Rank:
    stages: Stages
    number: int

    @property
    def first(self) -> bool:
        """It has the embedding."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """It has the head."""
        return self.number == self.stages.depth.pipe - 1

    @property
    def passes(self) -> dict[int, int]:
        """Forward passes of a micro-batch through each of its layers."""
        chunks, pipe = self.stages.depth.chunks, self.stages.depth.pipe
        mine = range(self.number, len(chunks), pipe)
        return {layer: self.stages.forward_passes(chunk) for chunk in mine for layer in chunks[chunk]}

    def in_stack(self, place: Place) -> tuple[float, float]:
        """(share of the slots of its part of a stack that hold layers, forward passes of a slot in the mean)."""
        group, run = place
        numbers = self.stages.depth.numbers[group][run]
        mine = (numbers[self.number] if self.stages.depth.lead else numbers).reshape(-1)
        passes = self.passes
        return float(np.mean(mine >= 0)), sum(passes[int(layer)] for layer in mine if layer >= 0) / mine.size


def tensors(model: K3) -> Iterator[tuple[str, jax.ShapeDtypeStruct, Place | None]]:
    """Name, shape and stack of every array of an abstract model; None: it belongs to no layer."""
    for group, runs in enumerate(model.groups):
        for run, blocks in enumerate(runs):
            for name, leaf in _named(blocks):
                yield name, leaf, (group, run)
    ends = jax.tree.map(lambda x: x, model)
    ends.groups = nnx.List([])
    for name, leaf in _named(ends):
        yield name, leaf, None


def _named(tree) -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
    return zip(jax.tree.leaves(leaf_names(tree)), jax.tree.leaves(tree), strict=True)
