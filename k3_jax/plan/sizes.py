"""Sizes of one device's share of a micro-batch, which bytes in memory and on the links are counted from."""

import math
from collections import Counter
from dataclasses import dataclass

import jax

from k3_jax import sharding
from k3_jax.config import K3Config, RunConfig
from k3_jax.nn.block import Kind
from k3_jax.plan.pod import Pod
from k3_jax.plan.stages import Stages

FLOAT = 4  # bytes of parameters, gradients and moments


@dataclass(frozen=True)
class Sizes:
    """Of one device and micro-batch."""

    config: K3Config
    tokens: int  # S
    width: int  # b
    micro: int  # micro-batches per step
    expert: int
    rows_over: str | None  # the axis that cuts rows
    ranks: int  # of it
    tensor: int
    slots: Counter[Kind]  # of one pass: its layers

    @staticmethod
    def of(run: RunConfig, pod: Pod) -> "Sizes":
        mesh = pod.mesh(run.mesh).shape
        rows = run.data.batch_size // run.train.grad_accumulation
        shards = math.prod(mesh[axis] for letter in "BT" for axis in sharding.ACTIVE[letter])
        width = jax.numpy.dtype(run.train.compute_dtype).itemsize
        tokens = rows * run.data.sequence_length // shards
        cut = next((axis for axis in sharding.ACTIVE["T"] if mesh[axis] > 1), None)
        ranks, micro = mesh[cut] if cut else 1, run.train.grad_accumulation
        return Sizes(run.model, tokens, width, micro, mesh["expert"], cut, ranks, mesh["tensor"], _slots(run))

    @property
    def stream(self) -> int:
        """Bytes of one [S, D] activation."""
        return self.tokens * self.config.hidden_size * self.width


def _slots(run: RunConfig) -> Counter[Kind]:
    found = Counter()
    for group in Stages.of(run).depth.groups:
        for kind, count in group.runs:
            found[kind] += group.repeat * count
    return found


def shard_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an abstract array on each device, without the padding of tiles."""
    shape = x.sharding.shard_shape(x.shape) if x.sharding else x.shape
    return math.prod(shape) * x.dtype.itemsize
