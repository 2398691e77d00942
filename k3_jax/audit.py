"""What a configuration amounts to, from shapes alone: parameters by part, cache and state sizes, optimizer rules.

Nothing is allocated: the model is an abstract one (`jax.eval_shape`), so 2.78T parameters take a second.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3_jax.config import K3Config, OptimizerConfig
from k3_jax.nn.kda import KDAState
from k3_jax.nn.layout import abstract_layers
from k3_jax.nn.mla import MLACache
from k3_jax.nn.transformer import K3
from k3_jax.train.optimizer import OptimizerRow, describe

Shapes = Mapping[str, tuple[int, ...]]

# The rows of the audit. Entries are names in a layer or, with a dot at the end, what these begin with.
PARTS: dict[str, tuple[str, ...]] = {
    "embedding": ("embed",),
    "lm_head": ("lm_head",),
    "kda": ("kda.",),
    "mla": ("mla.",),
    "dense_ffn": ("dense.",),
    "router_latent": ("moe.router", "moe.router_bias", "moe.latent_down", "moe.latent_norm", "moe.latent_up"),
    "shared_experts": ("moe.shared.",),
    "routed_experts": ("moe.w1", "moe.w2", "moe.w3"),
    "norms": ("attn_norm", "ffn_norm"),
    "attn_res": ("attn_res.", "ffn_res."),
    "output_attn_res": ("output_attn_res.",),
    "final_norm": ("norm",),
}


def abstract_model(config: K3Config) -> K3:
    """A K3 whose leaves are shapes."""
    return jax.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0)))


def parameter_shapes(model: K3) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its canonical name."""
    return {name: leaf.shape for name, leaf in abstract_layers(model, model.depth).items()}


def part_of(name: str) -> str:
    """The row of the audit that counts a canonical name. Raises ValueError unless there is exactly one."""
    local = name.split(".", 2)[2] if name.startswith("layers.") else name
    found = [
        part
        for part, entries in PARTS.items()
        if any(local.startswith(entry) if entry.endswith(".") else local == entry for entry in entries)
    ]
    if len(found) != 1:
        raise ValueError(f"parameter {name!r} is counted by {found}: expected exactly one part")
    return found[0]


def count_parameters(config: K3Config, shapes: Shapes) -> dict[str, Any]:
    """`total`, `active` and `by_part`. Active is what one token multiplies with: all but the embedding table and the
    experts it is not sent to, the head included (as report, Table 1: 104.2B)."""
    by_part = dict.fromkeys(PARTS, 0)
    for name, shape in shapes.items():
        by_part[part_of(name)] += math.prod(shape)
    total, idle = sum(by_part.values()), 0
    if config.moe is not None:
        E, k = config.moe.num_experts, config.moe.top_k
        idle = by_part["routed_experts"] // E * (E - k)
    return {"total": total, "active": total - by_part["embedding"] - idle, "by_part": by_part}


def cache_sizes(model: K3) -> dict[str, Any]:
    """What a sequence keeps while it is decoded.

    MLA layers keep `values_per_token_and_layer` values a token: `bytes_per_token` and `bytes_at_1e6_tokens` are of all
    of them in bfloat16, `relative_to_all_mla` against the same model with MLA in every layer. KDA layers keep a state
    of fixed size: `state_bytes_bf16` if all of it were bfloat16, `state_bytes` as here, with the recurrence in float32.
    """
    config = model.config
    tokens = jax.eval_shape(lambda m: m.init_cache(1, 1, jnp.bfloat16), model)
    layers = jax.tree.leaves(tokens.layers, is_leaf=lambda x: isinstance(x, KDAState | MLACache))
    kda = [layer for layer in layers if isinstance(layer, KDAState)]
    latents = sum(layer.latent.size for layer in layers if isinstance(layer, MLACache))
    recurrent, conv = sum(layer.S.size for layer in kda), sum(layer.conv.size for layer in kda)
    mla_layers = len(config.mla_layers)
    per_layer = latents // mla_layers if mla_layers else 0
    all_mla = config.mla.cache_dim * config.num_layers
    return {
        "values_per_token_and_layer": per_layer,
        "mla_layers": mla_layers,
        "kda_layers": config.num_layers - mla_layers,
        "bytes_per_token": 2 * latents,
        "bytes_at_1e6_tokens": 2 * latents * 10**6,
        "all_mla_bytes_at_1e6_tokens": 2 * all_mla * 10**6,
        "relative_to_all_mla": round(latents / all_mla - 1, 4),
        "recurrent_bytes_bf16": 2 * recurrent,
        "conv_bytes_bf16": 2 * conv,
        "state_bytes_bf16": 2 * (recurrent + conv),
        "state_bytes": 4 * recurrent + 2 * conv,
    }


def optimizer_rows(config: OptimizerConfig, model: K3Config, shapes: Shapes) -> list[OptimizerRow]:
    """The rule of every parameter, equal ones counted, in the order of the audit's parts."""
    parts = list(PARTS)
    return sorted(describe(config, model, shapes), key=lambda row: parts.index(part_of(row.name)))
