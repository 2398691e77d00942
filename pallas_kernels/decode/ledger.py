"""Bytes: what one rank keeps in HBM and VMEM, and what a step reads, against the least that any layout must read.

Arrays are stored in tiles of (8, 128) words of 32 bits: the last axis is padded to 128 lanes, the one before to whole
tiles, or to the next power of two where it is shorter than a tile.
"""

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp

from pallas_kernels.decode.config import LANES, DecodeConfig, round_up
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.record import GROUP
from pallas_kernels.decode.tape import Part


def padded_bytes(array: jax.ShapeDtypeStruct) -> int:
    """As Mosaic and XLA store it."""
    size = jnp.dtype(array.dtype).itemsize
    *outer, rows, lanes = (1, *array.shape) if len(array.shape) == 1 else array.shape
    packing = 4 // size
    tile = 8 * packing
    if rows < tile:
        rows = max(packing, 1 << (rows - 1).bit_length())
    return prod(outer) * round_up(rows, tile if rows >= tile else rows) * round_up(lanes, LANES) * size


@dataclass(frozen=True)
class Ledger:
    """Sizes in bytes; of one rank, but for `step_bytes` and `minimum_bytes`, which are of all."""

    plan: Plan

    @property
    def hbm(self) -> dict[str, int]:
        plan = self.plan
        return {name: padded_bytes(x) for name, x in (plan.weights | plan.caches | plan.outputs).items()}

    @property
    def vmem(self) -> dict[str, int]:
        plan = self.plan
        exchanges = {f"exchange.{name}": x for name, x in plan.exchange_buffers.items()}
        return {name: padded_bytes(x) for name, x in (plan.buffers | exchanges | plan.outputs).items()}

    @property
    def step(self) -> dict[str, int]:
        """HBM traffic of a step over all ranks by kind of array, caches of empty contexts included. The state of a row
        is read and written once; one that goes on from the row before is written only."""
        c, plan = self.plan.config, self.plan
        weights = plan.weights
        routed = len(c.moe_layers) * c.rows * c.moe.top_k * padded_bytes(_of(weights["experts"], 2))
        once = {name: padded_bytes(weights[name]) for name in ("tape", "vectors", "heads", "keys")}
        embed = c.rows * padded_bytes(_of(weights["embed"], 1))
        states = 2 * len(c.kda_layers) * self.states
        one = once | {"experts": routed, "embed": embed, "states": states}
        return {name: c.ranks * size for name, size in one.items()}

    @property
    def states(self) -> int:
        """Of all rows in one KDA layer."""
        return self.plan.config.rows * sum(padded_bytes(_of(self.plan.caches[name], 2)) for name in ("S", "conv"))

    @property
    def step_bytes(self) -> int:
        return sum(self.step.values())

    @property
    def minimum_bytes(self) -> int:
        """Every active weight once in the released formats, KDA states read and written."""
        c = self.plan.config
        weights = sum(_mixer_weights(c, kind.mla) + _channel_weights(c, kind.moe) for kind in c.layers)
        dense = 2 * (weights + c.hidden * c.vocab)
        routed = len(c.moe_layers) * c.rows * c.moe.top_k * self.expert_bytes
        states = 2 * 4 * len(c.kda_layers) * c.rows * c.kda.heads * c.kda.head_dim**2
        return dense + routed + states

    @property
    def model_bytes(self) -> int:
        """All matrices of the model once in the released formats."""
        c = self.plan.config
        weights = sum(_mixer_weights(c, kind.mla) + _channel_weights(c, kind.moe) for kind in c.layers)
        return 2 * (weights + 2 * c.hidden * c.vocab) + len(c.moe_layers) * c.moe.experts * self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Of one routed expert in MXFP4."""
        matrices = 3 * self.plan.config.moe.latent * self.plan.config.moe.expert
        return matrices // 2 + matrices // GROUP

    @property
    def padding(self) -> dict[str, float]:
        """Per part of the tape, its bytes over those of its matrices."""
        tape, blocks = self.plan.tape, self.plan.config.blocks
        parts = {"kda": tape.kda, "mla": tape.mla, "dense": tape.dense, "moe": tape.moe, "head": tape.head}
        rows = blocks.tile_rows * blocks.tile_cols
        return {name: part.tiles * rows / _weights_of(part) for name, part in parts.items()}


def _of(array: jax.ShapeDtypeStruct, leading: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape[leading:], array.dtype)


def _weights_of(part: Part) -> int:
    matrices = {block.matrix.name: block.matrix for block in part.blocks}
    return sum(matrix.depth * matrix.width for matrix in matrices.values())


def _mixer_weights(c: DecodeConfig, mla: bool) -> int:
    D, s, K = c.hidden, c.mla, c.kda.head_dim
    if not mla:
        P = c.kda.heads * K
        return 5 * D * P + D * K + K * P + D * c.kda.heads
    query = s.q_rank * (D + s.heads * (s.nope + s.pe))
    latent = D * (s.kv_rank + s.pe) + s.kv_rank * s.heads * (s.nope + s.v)
    return query + latent + 2 * D * s.heads * s.v


def _channel_weights(c: DecodeConfig, moe: bool) -> int:
    D, s = c.hidden, c.moe
    return D * (s.experts + 2 * s.latent + 3 * s.shared) if moe else 3 * D * c.dense
