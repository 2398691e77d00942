"""What the parts of the kernel share: one rank's references to memory, and its copies between HBM and VMEM."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.config import DecodeConfig
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.slots import Slots

F32, I32 = jnp.float32, jnp.int32
LOWEST = -1e30  # of a score: finite, so that it may be multiplied by 0


@dataclass(frozen=True)
class Core:
    """One rank inside of the kernel. `weights` and `caches` are in HBM, `buffers` in VMEM, `semaphores` those of local
    copies; `table` [L, ...], `token`, `position`, `slots` [B] each and `scalars` (chosen experts, their weights) are in
    SMEM."""

    plan: Plan
    rank: jax.Array
    table: object
    token: object
    position: object
    slots: Slots
    weights: SimpleNamespace
    caches: SimpleNamespace
    buffers: SimpleNamespace
    scalars: SimpleNamespace
    semaphores: SimpleNamespace

    @property
    def config(self) -> DecodeConfig:
        return self.plan.config

    def round(self, x):
        """To the dtype of activations and back."""
        return x.astype(self.config.dtype).astype(F32)

    def load(self, name: str, index):
        """Weights `index` of a stack in HBM, into one of their two places in VMEM."""
        source, place, semaphore = getattr(self.weights, name), lax.rem(index, 2), getattr(self.semaphores, name)
        return pltpu.make_async_copy(source.at[index], getattr(self.buffers, name).at[place], semaphore.at[place])

    def live(self, row: int):
        """Whether a row of the batch decodes in this step."""
        return self.position[row] >= 0


def semaphores(plan: Plan) -> dict[str, int]:
    """How many DMA semaphores each kind of local copy has."""
    blocks = plan.config.blocks
    pairs = ("vectors", "heads", "keys", "S", "conv", "S_back", "conv_back", "latent")
    return {
        "ring": blocks.banks,
        "experts": blocks.expert_slots,
        **{name: 2 for name in pairs},
        "latent_back": 1,
        "embed": plan.config.rows,
        "scalars": 1,
    }


def pad_lanes(x, lanes: int):
    """[B, K] with columns of zeros to the right."""
    missing = lanes - x.shape[1]
    return jnp.concatenate([x, jnp.zeros((len(x), missing), x.dtype)], axis=1) if missing else x


def pad_rows(x, rows: int):
    """[B, K] with rows of zeros below."""
    if x.shape[0] >= rows:
        return x
    return jnp.concatenate([x, jnp.zeros((rows - x.shape[0], x.shape[1]), x.dtype)], axis=0)


def joined(parts: list, axis: int):
    return jnp.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]
