"""From a K3 model to the decode megakernel: its configuration, and what every rank holds.

Dense weights must be bfloat16 values and routed experts MXFP4 values, as in a released checkpoint: packing is exact,
and refused where it cannot be.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from k3_jax.config import ConfigError, K3Config
from k3_jax.dtypes import GROUP, mxfp4_codes, mxfp4_decode, mxfp4_encode
from pallas_kernels.decode import (
    LANES,
    Blocks,
    DecodeConfig,
    DecodeConfigError,
    ExpertCodes,
    KDAShape,
    LayerKind,
    MLAShape,
    MoEShape,
    Packer,
    Plan,
    Widths,
    round_up,
)

EXPERTS = ("w1", "w3", "w2")
BLOCKS = Blocks(
    tile_rows=512,
    tile_cols=512,
    banks=48,
    expert_slots=16,
    cache_rows=256,
    whole_sum_bytes=1_000_000,  # three links of a TPU7x core carry 1.07 MB in the 8 us of two exchanges (published)
)


def decode_config(
    config: K3Config,
    *,
    ranks: int,
    rows: int,
    capacity: int,
    cache_ranks: int = 1,
    blocks: Blocks = BLOCKS,
    dtype: DTypeLike = jnp.bfloat16,
    slots: int | None = None,
) -> DecodeConfig:
    """The kernel's configuration of a model. Raises ConfigError where the kernel cannot be built for it."""
    own, config = _widths(config), widened(config, ranks)
    kda, mla, moe = config.kda, config.mla, config.moe
    try:
        return DecodeConfig(
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            layers=tuple(LayerKind(config.is_mla(i), config.is_moe(i)) for i in range(config.num_layers)),
            attn_res_block=config.attn_res_block,
            norm_eps=config.norm_eps,
            situ_beta=config.situ_beta,
            situ_linear_beta=config.situ_linear_beta,
            kda=KDAShape(kda.num_heads, kda.head_dim, kda.conv_width, kda.gate_lower_bound),
            mla=MLAShape(
                mla.num_heads,
                mla.q_lora_rank,
                mla.kv_lora_rank,
                mla.qk_nope_head_dim,
                mla.qk_rope_head_dim,
                mla.v_head_dim,
                mla.latent_norm_eps,
            ),
            dense=config.dense_dim,
            moe=MoEShape(
                moe.num_experts,
                moe.top_k,
                moe.latent_dim,
                moe.expert_dim,
                moe.shared_dim,
                moe.routed_scaling_factor,
                moe.renormalize,
            ),
            own=own,
            ranks=ranks,
            rows=rows,
            capacity=capacity,
            cache_ranks=cache_ranks,
            blocks=blocks,
            dtype=dtype,
            slots=slots,
        )
    except DecodeConfigError as error:
        raise ConfigError(str(error)) from None


def widened(config: K3Config, ranks: int) -> K3Config:
    """The model with its sizes rounded up to what the kernel is made for; K3's are. Raises ConfigError without
    experts."""
    if config.moe is None:
        raise ConfigError("moe = None: expected a model with routed experts, which the decode kernel is made for")
    kda, mla, moe = config.kda, config.mla, config.moe
    return replace(
        config,
        hidden_size=round_up(config.hidden_size, 2 * LANES),
        kda=replace(kda, head_dim=round_up(kda.head_dim, LANES)),
        mla=replace(
            mla,
            kv_lora_rank=round_up(mla.kv_lora_rank, LANES),
            qk_nope_head_dim=round_up(mla.qk_nope_head_dim, LANES),
            qk_rope_head_dim=round_up(mla.qk_rope_head_dim, LANES // 2),
            v_head_dim=round_up(mla.v_head_dim, LANES),
        ),
        moe=replace(
            moe,
            latent_dim=round_up(moe.latent_dim, 2 * LANES),
            expert_dim=round_up(moe.expert_dim, GROUP * max(ranks, 1)),
        ),
    )


def _widths(config: K3Config) -> Widths:
    mla, latent = config.mla, 0 if config.moe is None else config.moe.latent_dim
    q_rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank
    return Widths(config.hidden_size, config.kda.head_dim, q_rank, kv_rank, mla.qk_head_dim, latent)


def blocks_for(config: K3Config, ranks: int) -> Blocks:
    """`BLOCKS` where the model's sizes allow them, as K3's do; tiles that divide a smaller model's width, and no more
    banks than tiles of its head."""
    tile = next(size for size in (512, 256) if widened(config, ranks).hidden_size % size == 0)
    blocks = replace(BLOCKS, tile_rows=tile, tile_cols=tile, banks=1)
    config = decode_config(config, ranks=ranks, rows=1, capacity=blocks.cache_rows, blocks=blocks)
    return replace(blocks, banks=min(BLOCKS.banks, Plan(config).tape.head.tiles))


def expert_codes(name: str, weight: np.ndarray) -> ExpertCodes:
    """Codes and scales of experts [E, in, out] as the model holds them. Raises ConfigError unless MXFP4 is exact."""
    by_output = np.ascontiguousarray(np.swapaxes(np.asarray(weight, np.float32), 1, 2))
    packed, scales = mxfp4_encode(by_output)
    if not np.array_equal(mxfp4_decode(packed, scales, np.float32), by_output):
        raise ConfigError(f"{name} is not MXFP4: expected a checkpoint in the released layout")
    return ExpertCodes(mxfp4_codes(packed), scales)


def pack(plan: Plan, named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All ranks' weights [ranks, ...] in memory, from the model's tensors by canonical name."""
    experts = {name: expert_codes(name, x) for name, x in named.items() if name.rsplit(".", 1)[-1] in EXPERTS}
    ranks = [Packer(plan, rank).weights(named, experts) for rank in range(plan.config.ranks)]
    return {name: np.stack([rank[name] for rank in ranks]) for name in plan.weights}
