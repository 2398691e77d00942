"""What the decode megakernel is compiled for: a K3-family architecture, the ranks it is cut over, its block sizes.

Letters, here and in all of the folder: B rows of a step, P slots of the caches, D model width, N ranks, n an index of
one; H heads of the model, h of one rank; K key width of KDA, W taps of its convolution; Q query rank, C latent rank,
R extra key, V value width of MLA; E experts, k of them per token, L latent width, F expert width, S layers of an
AttnRes block.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

LANES = 128
TOGETHER = 6


class DecodeConfigError(ValueError):
    """A configuration that the kernel cannot be built for; the message names field, value and what was expected."""


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise DecodeConfigError(f"{name} = {value!r}: expected {expected}")


@dataclass(frozen=True)
class KDAShape:
    heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None


@dataclass(frozen=True)
class MLAShape:
    heads: int
    q_rank: int
    kv_rank: int
    nope: int
    pe: int
    v: int
    norm_eps: float


@dataclass(frozen=True)
class MoEShape:
    experts: int
    top_k: int
    latent: int
    expert: int
    shared: int
    scale: float
    renormalize: bool


@dataclass(frozen=True)
class Widths:
    """Sizes of the model itself, by which its norms and scales divide. The kernel's may be larger, up to whole lanes:
    weights are zeros there, and so is what they make. `query`: of one head's query and key in MLA."""

    hidden: int
    head_dim: int
    q_rank: int
    kv_rank: int
    query: int
    latent: int


@dataclass(frozen=True)
class LayerKind:
    mla: bool
    moe: bool


@dataclass(frozen=True)
class Blocks:
    """Sizes that change the schedule and no result.

    tile_rows, tile_cols   one tile of the weight tape, bfloat16; a tile is one DMA
    banks                  tiles in VMEM: so many are in flight or being used
    expert_slots           expert records in VMEM
    cache_rows             tokens of one tile of the latent cache
    whole_sum_bytes        a rank's part of a sum goes to all others whole if it puts at most so many bytes on the
                           links; else everyone adds up a slice, and the slices are gathered: one exchange more
    """

    tile_rows: int
    tile_cols: int
    banks: int
    expert_slots: int
    cache_rows: int
    whole_sum_bytes: int

    @property
    def together(self) -> int:
        """Tiles that are awaited at once."""
        return max(1, min(TOGETHER, self.banks // 2))


@dataclass(frozen=True)
class DecodeConfig:
    """`capacity` is in tokens per slot of the caches. `cache_ranks`: over how many ranks a slot's latents are cut, 1
    (each rank holds all of them: two exchanges fewer per MLA layer) or all of them. `dtype` is that of dense weights,
    activations and partial sums; float32 is for tests. `slots` of the caches: None are as many as rows; snapshots of
    states need more (`slots.py`)."""

    hidden: int
    vocab: int
    layers: tuple[LayerKind, ...]
    attn_res_block: int
    norm_eps: float
    situ_beta: float
    situ_linear_beta: float
    kda: KDAShape
    mla: MLAShape
    dense: int
    moe: MoEShape
    own: Widths
    ranks: int
    rows: int
    capacity: int
    cache_ranks: int
    blocks: Blocks
    dtype: DTypeLike = jnp.bfloat16
    slots: int | None = None

    def __post_init__(self):
        _require(self.ranks >= 2, "ranks", self.ranks, "at least 2")
        kinds = (any(k.mla for k in self.layers), not all(k.mla for k in self.layers), any(k.moe for k in self.layers))
        _require(all(kinds), "layers", len(self.layers), "layers of KDA, of MLA and of MoE among them")
        self._check_cut("hidden", self.hidden)
        self._check_cut("vocab", self.vocab)
        self._check_cut("kda.heads", self.kda.heads)
        for name in ("heads", "q_rank"):
            self._check_cut(f"mla.{name}", getattr(self.mla, name))
        self._check_cut("mla.kv_rank + mla.pe", self.mla.kv_rank + self.mla.pe)
        self._check_cut("dense", self.dense)
        for name in ("experts", "latent", "expert", "shared"):
            self._check_cut(f"moe.{name}", getattr(self.moe, name))
        wide = {"hidden": self.hidden, "moe.latent": self.moe.latent}
        for name, size in wide.items():
            _require(size % (2 * LANES) == 0, name, size, f"a multiple of {2 * LANES}: it travels as two halves")
        lanes = {"kda.head_dim": self.kda.head_dim, "mla.nope": self.mla.nope, "mla.v": self.mla.v}
        lanes |= {"mla.kv_rank": self.mla.kv_rank, "blocks.tile_cols": self.blocks.tile_cols}
        lanes |= {"blocks.tile_rows": self.blocks.tile_rows}
        for name, size in lanes.items():
            _require(size % LANES == 0, name, size, f"a multiple of {LANES}")
        _require(self.hidden % self.blocks.tile_cols == 0, "hidden", self.hidden, "a multiple of blocks.tile_cols")
        per_rank = self.moe.expert // self.ranks
        _require(per_rank % 32 == 0, "moe.expert / ranks", per_rank, "a multiple of 32: MXFP4's groups stay whole")
        _require(1 <= self.rows <= 8, "rows", self.rows, "1 to 8")
        _require(self.cache_slots >= self.rows, "slots", self.slots, f"at least {self.rows}, the rows of a step")
        _require(self.blocks.expert_slots >= 2, "blocks.expert_slots", self.blocks.expert_slots, "at least 2")
        _require(self.cache_ranks in (1, self.ranks), "cache_ranks", self.cache_ranks, f"1 or ranks = {self.ranks}")
        tile = self.blocks.cache_rows * self.cache_ranks
        expected = f"a multiple of {tile}: whole tiles on all ranks"
        _require(self.capacity % tile == 0, "capacity", self.capacity, expected)
        widest = max(self.moe.latent, self.moe.experts, self.mla.q_rank, self.mla.kv_rank)
        _require(widest <= self.hidden, "hidden", self.hidden, f"at least {widest}, the longest vector of a layer")

    def _check_cut(self, name: str, value: int) -> None:
        _require(value % self.ranks == 0, name, value, f"a multiple of ranks = {self.ranks}")

    @property
    def precision(self) -> lax.Precision:
        """Of products: a TPU's default for float32 would be one pass of bfloat16."""
        return lax.Precision.HIGHEST if self.dtype == jnp.float32 else lax.Precision.DEFAULT

    @property
    def cache_slots(self) -> int:
        return self.rows if self.slots is None else self.slots

    def share(self, size: int) -> int:
        """What one rank holds of so many."""
        return size // self.ranks

    def columns(self, size: int) -> int:
        """How many numbers of a vector a rank holds where they are put side by side again: whole lanes. The last ranks
        then have fewer, or none."""
        return round_up(self.share(size), LANES)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if not kind.mla)

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if kind.mla)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layers) if kind.moe)

    @property
    def attn_res_blocks(self) -> int:
        return -(-len(self.layers) // self.attn_res_block)

    @property
    def key_width(self) -> int:
        """Of a cached token in lanes: latent, extra key, zeros up to whole lane tiles."""
        return round_up(self.mla.kv_rank + self.mla.pe, LANES)

    @property
    def query_heads(self) -> int:
        """Heads whose attention a rank computes over its part of the cache."""
        return self.mla.heads // self.ranks * self.cache_ranks

    @property
    def cache_length(self) -> int:
        """Tokens of a slot on one rank."""
        return self.capacity // self.cache_ranks


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
