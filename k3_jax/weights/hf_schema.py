"""The schema of the released `config.json`: its keys, checked access to one object, the quantization it may name."""

import difflib
from collections.abc import Mapping
from typing import Any

from k3_jax.config import ConfigError

# Keys whose value this model cannot vary: key and the value it must have.
FIXED_TEXT = {
    "hidden_act": "situ",
    "tie_word_embeddings": False,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_nextn_predict_layers": 0,
}
FIXED_MOE = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "latent_moe_use_norm": True,
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

TEXT_KEYS = frozenset(
    """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size rms_norm_eps
    activation_situ_beta activation_situ_linear_beta initializer_range max_position_embeddings attn_res_block_size
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim linear_attn_config first_k_dense_replace
    quantization_config k3_jax""".split()
).union(FIXED_TEXT, TOKENS)
MOE_KEYS = frozenset(
    """num_experts num_experts_per_token num_shared_experts moe_intermediate_size routed_expert_hidden_size
    routed_scaling_factor moe_renormalize use_grouped_topk""".split()
).union(FIXED_MOE)
LINEAR_KEYS = frozenset(
    """head_dim num_heads short_conv_kernel_size use_full_rank_gate gate_lower_bound full_attn_layers
    kda_layers""".split()
)
VISION_KEYS = ("vision_config", "image_placeholder", "media_placeholder_token_id")
TOP_KEYS = frozenset("text_config quantization_config tie_word_embeddings ignore_index".split()).union(
    TOKENS, VISION_KEYS
)

# Without effect on this model: generation settings and bookkeeping that the library writes into every file. The four
# in the last line come from the class defaults; there are no rotary positions, and head sizes have their own keys.
INERT = frozenset(
    """add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16
    use_cache _name_or_path _attn_implementation
    rope_theta rope_scaling rope_parameters head_dim""".split()
)

# This project's own settings that the released file has no key for; written only where they differ from the default.
EXTENSIONS = {"latent_norm_eps": 1e-6, "quantile_bins": 1000}

MXFP4_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "zp_dtype": None,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}


def value_error(where: str, value: Any, expected: str) -> ConfigError:
    return ConfigError(f"{where} = {value!r}: expected {expected}")


class Section:
    """One JSON object; every getter checks presence and type and names the key in its error."""

    def __init__(self, data: Any, path: str, known: frozenset[str]):
        if not isinstance(data, Mapping):
            raise value_error(path.rstrip(".") or "config", data, "an object")
        self.data, self.path = data, path
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(key, sorted(known - INERT), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"{path}{key} = {data[key]!r}: unknown key{hint}")

    def get(self, key: str, expected: str) -> Any:
        if key not in self.data:
            raise ConfigError(f"{self.path}{key} is missing: expected {expected}")
        return self.data[key]

    def integer(self, key: str, minimum: int = 1) -> int:
        expected = f"an integer of at least {minimum}"
        value = self.get(key, expected)
        if type(value) is not int or value < minimum:
            raise value_error(self.path + key, value, expected)
        return value

    def number(self, key: str, positive: bool = True) -> float:
        expected = "a positive number" if positive else "a number"
        value = self.get(key, expected)
        if type(value) not in (int, float) or (positive and not 0 < value < float("inf")) or value != value:
            raise value_error(self.path + key, value, expected)
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.get(key, "true or false")
        if type(value) is not bool:
            raise value_error(self.path + key, value, "true or false")
        return value

    def fixed(self, key: str, expected: Any) -> None:
        text = f"{expected!r} (the only value this model supports)"
        value = self.get(key, text)
        if type(value) is not type(expected) or value != expected:
            raise value_error(self.path + key, value, text)

    def layers(self, key: str, num_layers: int) -> list[int]:
        expected = f"a list of 1-based layer numbers, 1..{num_layers}"
        value = self.get(key, expected)
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise value_error(self.path + key, value, expected)
        outside = [i for i in value if not 1 <= i <= num_layers]
        if outside:
            raise ConfigError(f"{self.path}{key} contains {outside[0]}: layer lists are 1-based, 1..{num_layers}")
        if len(set(value)) != len(value):
            twice = next(i for i in value if value.count(i) > 1)
            raise ConfigError(f"{self.path}{key} contains {twice} twice: expected each 1-based layer number once")
        return value


def check_quantization(data: Any, path: str) -> None:
    """Only MXFP4 in groups of 32 is understood. Which tensors are packed is read from the checkpoint, not from
    `ignore`: the published list leaves out tensors that are stored as plain bfloat16."""

    def require(section: Any, where: str, expected: Mapping[str, Any]) -> None:
        if not isinstance(section, Mapping):
            raise value_error(where, section, "an object")
        for key, value in expected.items():
            if key not in section or type(section[key]) is not type(value) or section[key] != value:
                raise value_error(f"{where}.{key}", section.get(key), f"{value!r} (MXFP4, groups of 32)")

    require(data, path, {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"})
    groups = data.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise value_error(f"{path}.config_groups", groups, "an object with at least one group")
    for name, group in groups.items():
        where = f"{path}.config_groups.{name}"
        if not isinstance(group, Mapping):
            raise value_error(where, group, "an object")
        if "format" in group:
            require(group, where, {"format": "mxfp4-pack-quantized"})
        if group.get("input_activations") is not None:
            raise value_error(f"{where}.input_activations", group["input_activations"], "null (weights only)")
        weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
        require(group.get("weights"), f"{where}.weights", weights)
