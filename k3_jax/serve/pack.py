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
from k3_jax.dtypes import mxfp4_decode, mxfp4_encode
from pallas_kernels.decode import (
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
)
from pallas_kernels.decode.config import LANES
from pallas_kernels.decode.tape import Tape

EXPERTS = ("w1", "w3", "w2")
BLOCKS = Blocks(
    tile_rows=512,
    tile_cols=512,
    banks=48,
    expert_slots=16,
    cache_rows=256,
    whole_sum_bytes=536_000,  # what three links of a TPU7x core carry in 4 us, the time of an exchange (published)
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
) -> DecodeConfig:
    """The kernel's configuration of a model. Raises ConfigError where the kernel cannot be built for it."""
    if config.moe is None:
        raise ConfigError("moe = None: expected a model with routed experts, which the decode kernel is made for")
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
            ranks=ranks,
            rows=rows,
            capacity=capacity,
            cache_ranks=cache_ranks,
            blocks=blocks,
            dtype=dtype,
        )
    except DecodeConfigError as error:
        raise ConfigError(str(error)) from None


def blocks_for(config: K3Config, ranks: int) -> Blocks:
    """`BLOCKS` where the model's sizes allow them, as K3's do; tiles that divide a smaller model's width, and no more
    banks than tiles of its head."""
    tile = next((size for size in (512, 256) if config.hidden_size % size == 0), LANES)
    blocks = replace(BLOCKS, tile_rows=tile, tile_cols=tile, banks=1)
    if config.moe is not None:
        blocks = replace(blocks, expert_columns=min(BLOCKS.expert_columns, config.moe.latent_dim))
    config = decode_config(config, ranks=ranks, rows=1, capacity=blocks.cache_rows, blocks=blocks)
    return replace(blocks, banks=min(BLOCKS.banks, Tape(config).head.tiles))


def expert_codes(name: str, weight: np.ndarray) -> ExpertCodes:
    """Codes and scales of experts [E, in, out] as the model holds them. Raises ConfigError unless MXFP4 is exact."""
    by_output = np.ascontiguousarray(np.swapaxes(np.asarray(weight, np.float32), 1, 2))
    packed, scales = mxfp4_encode(by_output)
    if not np.array_equal(mxfp4_decode(packed, scales, np.float32), by_output):
        raise ConfigError(f"{name} is not MXFP4: expected a checkpoint in the released layout")
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(by_output.shape)
    return ExpertCodes(codes, scales)


def pack(plan: Plan, named: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All ranks' weights [ranks, ...] in memory, from the model's tensors by canonical name."""
    experts = {name: expert_codes(name, x) for name, x in named.items() if name.rsplit(".", 1)[-1] in EXPERTS}
    ranks = [Packer(plan, rank).weights(named, experts) for rank in range(plan.config.ranks)]
    return {name: np.stack([rank[name] for rank in ranks]) for name in plan.weights}
