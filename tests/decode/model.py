"""A small K3 for the decode kernel: 13 layers of every kind, and weights that the kernel's storage holds exactly."""

import dataclasses

import ml_dtypes
import numpy as np

from k3_jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from k3_jax.dtypes import mxfp4_decode, mxfp4_encode
from k3_jax.nn import layout
from k3_jax.serve.pack import EXPERTS, decode_config
from pallas_kernels.decode import Blocks, DecodeConfig
from tests.models import abstract_model, draw

BLOCKS = Blocks(
    tile_rows=256,
    tile_cols=256,
    banks=4,
    expert_slots=5,
    cache_rows=16,
    whole_sum_bytes=10**6,
)
ALWAYS_FLOAT32 = ("A_log", "dt_bias", "o_norm", "router_bias", "q_conv", "k_conv", "v_conv")
# Rounding differences must not decide a token or an expert: sums grow slowly, routers are sure of themselves.
FACTORS = {"query": 0.05, "router": 4.0, "o": 0.1, "down": 0.1, "latent_up": 0.1}


def model_config(layers: int = 13, ranks: int = 4) -> K3Config:
    """With a head and a group of 32 expert channels for every rank."""
    heads = max(4, ranks)
    return K3Config(
        vocab_size=4096,
        hidden_size=256,
        num_layers=layers,
        mla_layers=tuple(i for i in (3, 7, 11, 12) if i < layers),
        kda=KDAConfig(num_heads=heads, head_dim=128),
        mla=MLAConfig(
            heads, q_lora_rank=64, kv_lora_rank=128, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        dense_dim=256,
        moe=MoEConfig(num_experts=max(16, ranks), top_k=4, latent_dim=256, expert_dim=32 * heads, shared_dim=128),
        attn_res_block=3,
    )


def kernel_config(config: K3Config, **changes) -> DecodeConfig:
    """For 4 ranks, two rows and 64 tokens."""
    blocks = dataclasses.replace(BLOCKS, **changes.pop("blocks", {}))
    return decode_config(config, **({"ranks": 4, "rows": 2, "capacity": 64, "blocks": blocks} | changes))


def weights(config: K3Config, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 arrays by canonical name; experts are MXFP4 values, other matrices and norms bfloat16 values."""
    rng, like = np.random.default_rng(seed), abstract_model(config)
    named = {}
    for name, x in sorted(layout.abstract_layers(like, like.depth).items()):
        named[name] = _stored(name.rsplit(".", 1)[-1], draw(name, x.shape, rng).astype(np.float32))
    return named


def _stored(kind: str, x: np.ndarray) -> np.ndarray:
    if kind in EXPERTS:
        codes = mxfp4_encode(np.ascontiguousarray(x.swapaxes(1, 2)))
        return np.ascontiguousarray(mxfp4_decode(*codes, np.float32).swapaxes(1, 2))
    if kind in ALWAYS_FLOAT32:
        return x
    return (x * FACTORS.get(kind, 1.0)).astype(ml_dtypes.bfloat16).astype(np.float32)
