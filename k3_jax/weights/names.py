"""One table: canonical parameter names <-> tensors of the released checkpoint, with shapes, dtypes and axis order.

Each row reads "axes in the file -> axes in memory", letter by letter: `(H K) D -> D H K` is a torch `[out, in]` matrix
whose rows are head-major. `1` is an axis of length one that memory drops; `H+` is H values followed by zeros.
Shapes, dtypes and names: released index and config (497,220 tensors, 1,560,860,324,864 bytes), checked by the tests.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3_jax.config import ConfigError, K3Config
from k3_jax.dtypes import GROUP
from k3_jax.weights.safetensors import TensorInfo

MXFP4 = "MXFP4"  # stands for two U8 tensors, weight_packed and weight_scale


@dataclass(frozen=True)
class Row:
    """`name` is canonical, `stored` the released name; both are relative to the layer, `{}` is an expert."""

    name: str
    stored: str
    axes: str
    dtype: str = "BF16"


LAYER = (
    Row("attn_res.norm", "self_attention_res_norm.weight", "D -> D"),
    Row("attn_res.query", "self_attention_res_proj.weight", "1 D -> D"),
    Row("attn_norm", "input_layernorm.weight", "D -> D"),
    Row("ffn_res.norm", "mlp_res_norm.weight", "D -> D"),
    Row("ffn_res.query", "mlp_res_proj.weight", "1 D -> D"),
    Row("ffn_norm", "post_attention_layernorm.weight", "D -> D"),
)
KDA = (
    Row("kda.q", "self_attn.q_proj.weight", "(H K) D -> D H K"),
    Row("kda.k", "self_attn.k_proj.weight", "(H K) D -> D H K"),
    Row("kda.v", "self_attn.v_proj.weight", "(H K) D -> D H K"),
    Row("kda.g", "self_attn.g_proj.weight", "(H K) D -> D H K"),
    Row("kda.q_conv", "self_attn.q_conv1d.weight", "(H K) 1 W -> W H K", "F32"),
    Row("kda.k_conv", "self_attn.k_conv1d.weight", "(H K) 1 W -> W H K", "F32"),
    Row("kda.v_conv", "self_attn.v_conv1d.weight", "(H K) 1 W -> W H K", "F32"),
    Row("kda.f_a", "self_attn.f_a_proj.weight", "R D -> D R"),
    Row("kda.f_b", "self_attn.f_b_proj.weight", "(H K) R -> R H K"),
    Row("kda.dt_bias", "self_attn.dt_bias", "(H K) -> H K", "F32"),
    Row("kda.A_log", "self_attn.A_log", "H+ -> H", "F32"),
    Row("kda.b", "self_attn.b_proj.weight", "H D -> D H"),
    Row("kda.o_norm", "self_attn.o_norm.weight", "K -> K", "F32"),
    Row("kda.o", "self_attn.o_proj.weight", "D (H K) -> H K D"),
)
MLA = (  # P: 128 nope then 64 rope of one head; U: 128 key then 128 value of one head
    Row("mla.q_a", "self_attn.q_a_proj.weight", "Q D -> D Q"),
    Row("mla.q_a_norm", "self_attn.q_a_layernorm.weight", "Q -> Q"),
    Row("mla.q_b", "self_attn.q_b_proj.weight", "(M P) Q -> Q M P"),
    Row("mla.kv_a", "self_attn.kv_a_proj_with_mqa.weight", "X D -> D X"),
    Row("mla.kv_a_norm", "self_attn.kv_a_layernorm.weight", "C -> C"),
    Row("mla.kv_b", "self_attn.kv_b_proj.weight", "(M U) C -> C M U"),
    Row("mla.g", "self_attn.g_proj.weight", "(M V) D -> D M V"),
    Row("mla.o", "self_attn.o_proj.weight", "D (M V) -> M V D"),
)
DENSE = (
    Row("dense.gate", "mlp.gate_proj.weight", "I D -> D I"),
    Row("dense.up", "mlp.up_proj.weight", "I D -> D I"),
    Row("dense.down", "mlp.down_proj.weight", "D I -> I D"),
)
MOE = (
    Row("moe.router", "block_sparse_moe.gate.weight", "E D -> D E"),
    Row("moe.router_bias", "block_sparse_moe.gate.e_score_correction_bias", "E -> E", "F32"),
    Row("moe.latent_down", "block_sparse_moe.routed_expert_down_proj.weight", "L D -> D L"),
    Row("moe.latent_norm", "block_sparse_moe.routed_expert_norm.weight", "L -> L"),
    Row("moe.latent_up", "block_sparse_moe.routed_expert_up_proj.weight", "D L -> L D"),
    Row("moe.w1", "block_sparse_moe.experts.{}.w1", "F L -> L F", MXFP4),
    Row("moe.w3", "block_sparse_moe.experts.{}.w3", "F L -> L F", MXFP4),
    Row("moe.w2", "block_sparse_moe.experts.{}.w2", "L F -> F L", MXFP4),
    Row("moe.shared.gate", "block_sparse_moe.shared_experts.gate_proj.weight", "S D -> D S"),
    Row("moe.shared.up", "block_sparse_moe.shared_experts.up_proj.weight", "S D -> D S"),
    Row("moe.shared.down", "block_sparse_moe.shared_experts.down_proj.weight", "D S -> S D"),
)
TOP = (
    Row("embed", "language_model.model.embed_tokens.weight", "T D -> T D"),
    Row("output_attn_res.norm", "language_model.model.output_attn_res_norm.weight", "D -> D"),
    Row("output_attn_res.query", "language_model.model.output_attn_res_proj.weight", "1 D -> D"),
    Row("norm", "language_model.model.norm.weight", "D -> D"),
    Row("lm_head", "language_model.lm_head.weight", "T D -> D T"),
)
VISION_BLOCK = (
    Row("norm0", "norm0.weight", "D -> D"),
    Row("norm1", "norm1.weight", "D -> D"),
    Row("wqkv", "wqkv.weight", "Z D -> D Z"),
    Row("wo", "wo.weight", "D A -> A D"),
    Row("mlp.fc0", "mlp.fc0.weight", "F D -> D F"),
    Row("mlp.fc1", "mlp.fc1.weight", "D F -> F D"),
)
VISION_TOWER = (
    Row("vision.patch_embed", "vision_tower.patch_embed.proj.weight", "D c p q -> c p q D"),
    Row("vision.pos_emb", "vision_tower.patch_embed.pos_emb.weight", "h w D -> h w D"),
    Row("vision.norm", "vision_tower.encoder.final_layernorm.weight", "D -> D"),
)
PROJECTOR = (
    Row("projector.fc0", "mm_projector.proj.0.weight", "N J -> J N"),
    Row("projector.fc1", "mm_projector.proj.2.weight", "B N -> N B"),
    Row("projector.norm", "mm_projector.post_norm.weight", "B -> B"),
)


def padded_heads(heads: int) -> int:
    """Length of the stored `A_log`: the next power of two, at least 32 (96 -> 128, 4 -> 32 in the known files)."""
    return max(32, 1 << (heads - 1).bit_length())


def _flat(axes: str) -> list[str]:
    return axes.replace("(", "").replace(")", "").split()


@dataclass(frozen=True)
class Parameter:
    """One row of the table for one layer and one configuration.

    `experts` is 0, or the number of released matrices that are stacked along a leading axis.
    """

    name: str
    stored: str
    row: Row
    dims: Mapping[str, int]
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in memory."""
        inner = tuple(self.dims[a] for a in _flat(self.row.axes.split("->")[1]))
        return (self.experts, *inner) if self.experts else inner

    @functools.cached_property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one released tensor (of one unpacked expert matrix)."""
        groups = re.findall(r"\([^)]*\)|\S+", self.row.axes.split("->")[0])
        return tuple(math.prod(self.dims[a] for a in _flat(group)) for group in groups)

    @property
    def is_padded(self) -> bool:
        return "+" in self.row.axes

    def expert(self, index: int) -> str:
        """Released name of an expert's matrix, without `.weight`, `.weight_packed` or `.weight_scale`."""
        return self.stored.format(index)

    @functools.cached_property
    def _packed(self) -> tuple[TensorInfo, TensorInfo]:
        rows, columns = self.stored_shape
        if columns % GROUP:
            raise ConfigError(f"{self.name} has {columns} inputs: expected a multiple of {GROUP}, the group of MXFP4")
        return TensorInfo("U8", (rows, columns // 2)), TensorInfo("U8", (rows, columns // GROUP))

    def packed_infos(self, index: int) -> dict[str, TensorInfo]:
        """The two tensors of a packed expert; scales lie along the input dimension, which is last in the file."""
        packed, scale = self._packed
        base = self.expert(index)
        return {f"{base}.weight_packed": packed, f"{base}.weight_scale": scale}

    def infos(self) -> Iterator[tuple[str, TensorInfo]]:
        """Name, dtype and shape of every released tensor this parameter is made of."""
        if self.row.dtype != MXFP4:
            yield self.stored, TensorInfo(self.row.dtype, self.stored_shape)
            return
        packed, scale = self._packed
        for index in range(self.experts):  # 247,296 times for the released model: no calls
            base = self.stored.format(index)
            yield f"{base}.weight_packed", packed
            yield f"{base}.weight_scale", scale

    def to_memory(self, array: np.ndarray) -> np.ndarray:
        """A released tensor (one expert) in the axis order of memory: a view where possible. `H+` drops the tail."""
        left, right = map(_flat, self.row.axes.split("->"))
        if self.is_padded:
            return array[: self.dims[right[0]]]
        array = array.reshape([self.dims[a] for a in left if a != "1"])
        left = [a for a in left if a != "1"]
        return array.transpose([left.index(a) for a in right])

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `to_memory`; `H+` appends zeros."""
        left, right = map(_flat, self.row.axes.split("->"))
        if self.is_padded:
            return np.pad(array, (0, self.stored_shape[0] - len(array)))
        order = [right.index(a) for a in left if a != "1"]
        return array.transpose(order).reshape(self.stored_shape)


def _dims(config: K3Config) -> dict[str, int]:
    kda, mla, moe = config.kda, config.mla, config.moe
    dims = {"1": 1, "D": config.hidden_size, "T": config.vocab_size, "I": config.dense_dim}
    dims |= {"H": kda.num_heads, "H+": padded_heads(kda.num_heads), "K": kda.head_dim, "R": kda.head_dim}
    dims |= {"W": kda.conv_width, "M": mla.num_heads, "Q": mla.q_lora_rank, "C": mla.kv_lora_rank, "X": mla.cache_dim}
    dims |= {"P": mla.qk_head_dim, "U": mla.qk_nope_head_dim + mla.v_head_dim, "V": mla.v_head_dim}
    if moe is not None:
        dims |= {"E": moe.num_experts, "L": moe.latent_dim, "F": moe.expert_dim, "S": moe.shared_dim}
    return dims


def layer_parameters(config: K3Config, layer: int) -> list[Parameter]:
    """The parameters of one layer (0-based), in the table's order."""
    dims = _dims(config)
    rows = LAYER + (MLA if config.is_mla(layer) else KDA) + (MOE if config.is_moe(layer) else DENSE)
    prefix = f"language_model.model.layers.{layer}."
    return [
        Parameter(f"layers.{layer}.{r.name}", prefix + r.stored, r, dims, dims["E"] if r.dtype == MXFP4 else 0)
        for r in rows
    ]


def top_parameters(config: K3Config) -> list[Parameter]:
    """Embedding, output AttnRes, final norm and head."""
    dims = _dims(config)
    return [Parameter(r.name, r.stored, r, dims) for r in TOP]


def text_parameters(config: K3Config) -> Iterator[Parameter]:
    """Every parameter of the text model, layer by layer, the top level last."""
    for layer in range(config.num_layers):
        yield from layer_parameters(config, layer)
    yield from top_parameters(config)


def vision_parameters(vision: Mapping[str, Any]) -> tuple[list[Parameter], list[Parameter]]:
    """Tower and projector of a checkpoint with this `vision_config` (the JSON object)."""

    def size(key: str) -> int:
        value = vision.get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(f"vision_config.{key} = {value!r}: expected a positive integer")
        return value

    kernel = vision.get("merge_kernel_size")
    if not isinstance(kernel, list | tuple) or not all(type(k) is int and k > 0 for k in kernel):
        raise ConfigError(f"vision_config.merge_kernel_size = {kernel!r}: expected a list of positive integers")
    dims = {"D": size("vt_hidden_size"), "F": size("vt_intermediate_size"), "A": size("qkv_hidden_size")}
    dims |= {"c": 3, "p": size("patch_size"), "q": size("patch_size"), "Z": 3 * dims["A"]}
    dims |= {"h": size("init_pos_emb_height"), "w": size("init_pos_emb_width"), "B": size("text_hidden_size")}
    dims |= {"J": dims["D"] * math.prod(kernel), "N": size("mm_hidden_size") * math.prod(kernel)}
    tower = [Parameter(r.name, r.stored, r, dims) for r in VISION_TOWER]
    for block in range(size("vt_num_hidden_layers")):
        prefix = f"vision_tower.encoder.blocks.{block}."
        tower += [Parameter(f"vision.blocks.{block}.{r.name}", prefix + r.stored, r, dims) for r in VISION_BLOCK]
    return tower, [Parameter(r.name, r.stored, r, dims) for r in PROJECTOR]


def shards(config: K3Config, vision: Mapping[str, Any] | None = None) -> list[list[Parameter]]:
    """The parameters of each file as released: one file per layer, the top level, then projector and tower."""
    files = [layer_parameters(config, layer) for layer in range(config.num_layers)] + [top_parameters(config)]
    if vision is not None:
        tower, projector = vision_parameters(vision)
        files += [projector, tower]
    return files


def shard_name(index: int, count: int) -> str:
    """`index` is 0-based; the files are numbered from 1."""
    return f"model-{index + 1:05d}-of-{count:06d}.safetensors"
