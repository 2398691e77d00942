"""The released `config.json` <-> `K3Config`.

Nothing is taken from class defaults (those of the published configuration class describe another model): a key that
decides the architecture is required, checked and, if the model cannot honour its value, refused. A key that is
neither known nor Hugging Face boilerplate is an error too, so that a misspelt or new one is never ignored.
Layer lists are 1-based in the file and 0-based in `K3Config`.
"""

from collections.abc import Mapping
from typing import Any

from k3_jax.config import ConfigError, K3Config, KDAConfig, MLAConfig, MoEConfig
from k3_jax.weights.hf_schema import (
    EXTENSIONS,
    FIXED_MOE,
    FIXED_TEXT,
    INERT,
    LINEAR_KEYS,
    MOE_KEYS,
    MXFP4_QUANTIZATION,
    TEXT_KEYS,
    TOKENS,
    TOP_KEYS,
    VISION_KEYS,
    Section,
    check_quantization,
    value_error,
)


def _mla_layers(linear: Section, num_layers: int) -> tuple[int, ...]:
    mla = linear.layers("full_attn_layers", num_layers)
    kda = linear.layers("kda_layers", num_layers)
    both = sorted(set(mla) & set(kda))
    neither = sorted(set(range(1, num_layers + 1)) - set(mla) - set(kda))
    for layers, problem in ((both, "in both lists"), (neither, "in neither list")):
        if layers:
            raise ConfigError(
                f"{linear.path}kda_layers and full_attn_layers: layer {layers[0]} is {problem}; together they must "
                f"hold each of 1..{num_layers} once (layer lists are 1-based)"
            )
    return tuple(sorted(i - 1 for i in mla))


def _read_kda(text: Section, num_layers: int) -> tuple[KDAConfig, tuple[int, ...]]:
    path = text.path + "linear_attn_config."
    linear = Section(text.get("linear_attn_config", "an object"), path, LINEAR_KEYS)
    linear.fixed("use_full_rank_gate", True)
    # Absent means the unbounded softplus gate, not the released model's -5.
    bound = None if linear.data.get("gate_lower_bound") is None else linear.number("gate_lower_bound", positive=False)
    if bound is not None and not -5.9 <= bound < 0:
        raise value_error(path + "gate_lower_bound", bound, "null or a number in [-5.9, 0)")
    kda = KDAConfig(
        num_heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_width=linear.integer("short_conv_kernel_size"),
        gate_lower_bound=bound,
    )
    return kda, _mla_layers(linear, num_layers)


def _read_mla(text: Section, extensions: Mapping[str, Any]) -> MLAConfig:
    heads = text.integer("num_attention_heads")
    if text.integer("num_key_value_heads") != heads:
        raise value_error(
            text.path + "num_key_value_heads", text.data["num_key_value_heads"], f"num_attention_heads = {heads}"
        )
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return MLAConfig(heads, *map(text.integer, names), latent_norm_eps=extensions["latent_norm_eps"])


def _read_moe(text: Section, all_dense: bool, extensions: Mapping[str, Any]) -> MoEConfig | None:
    if all_dense and text.data.get("num_experts") is None:
        return None
    for key, value in FIXED_MOE.items():
        text.fixed(key, value)
    text.boolean("use_grouped_topk")  # either value: with one group the grouping does nothing
    num_experts, top_k = text.integer("num_experts"), text.integer("num_experts_per_token")
    if top_k >= num_experts:
        raise value_error(text.path + "num_experts_per_token", top_k, f"less than num_experts = {num_experts}")
    expert_dim = text.integer("moe_intermediate_size")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        latent_dim=text.integer("routed_expert_hidden_size"),
        expert_dim=expert_dim,
        shared_dim=text.integer("num_shared_experts") * expert_dim,
        routed_scaling_factor=text.number("routed_scaling_factor"),
        renormalize=text.boolean("moe_renormalize"),
        quantile_bins=extensions["quantile_bins"],
    )


def _read_extensions(text: Section) -> dict[str, Any]:
    own = Section(text.data.get("k3_jax", {}), text.path + "k3_jax.", frozenset(EXTENSIONS))
    checked = {key: own.integer(key) if type(EXTENSIONS[key]) is int else own.number(key) for key in own.data}
    return EXTENSIONS | checked


def _read_tokens(text: Section, vocab_size: int) -> dict[str, int]:
    tokens = {key: text.integer(key, minimum=0) for key in TOKENS}
    for key, value in tokens.items():
        if value >= vocab_size:
            raise value_error(text.path + key, value, f"a token below vocab_size = {vocab_size}")
    return tokens


def _read_text(text: Section) -> K3Config:
    for key, value in FIXED_TEXT.items():
        text.fixed(key, value)
    if text.data.get("quantization_config") is not None:
        check_quantization(text.data["quantization_config"], text.path + "quantization_config")
    extensions = _read_extensions(text)
    num_layers, vocab_size = text.integer("num_hidden_layers"), text.integer("vocab_size")
    dense_layers = text.integer("first_k_dense_replace", minimum=0)
    if dense_layers > num_layers:
        raise value_error(
            text.path + "first_k_dense_replace", dense_layers, f"at most num_hidden_layers = {num_layers}"
        )
    kda, mla_layers = _read_kda(text, num_layers)
    return K3Config(
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        num_layers=num_layers,
        mla_layers=mla_layers,
        kda=kda,
        mla=_read_mla(text, extensions),
        dense_dim=text.integer("intermediate_size"),
        moe=_read_moe(text, dense_layers == num_layers, extensions),
        first_dense_layers=dense_layers,
        attn_res_block=text.integer("attn_res_block_size"),
        norm_eps=text.number("rms_norm_eps"),
        situ_beta=text.number("activation_situ_beta"),
        situ_linear_beta=text.number("activation_situ_linear_beta"),
        init_std=text.number("initializer_range"),
        max_positions=text.integer("max_position_embeddings"),
        **_read_tokens(text, vocab_size),
    )


def _check_model_type(section: Section, expected: str) -> None:
    if "model_type" in section.data:
        section.fixed("model_type", expected)


def config_from_hf(data: Mapping[str, Any]) -> K3Config:
    """Reads a parsed `config.json`: the released one (with `text_config`) or a bare text configuration.

    Raises ConfigError that names the key for anything missing, unknown, of the wrong type or not supported. The vision
    part is accepted and not represented in `K3Config`; `vision_config` returns it.
    """
    if not isinstance(data, Mapping):
        raise value_error("config.json", data, "an object")
    if "text_config" not in data:
        if data.get("model_type") == "kimi_k3":
            raise ConfigError("text_config is missing: expected an object (model_type is 'kimi_k3')")
        text = Section(data, "", TEXT_KEYS | MOE_KEYS | INERT)
        _check_model_type(text, "kimi_linear")
        return _read_text(text)
    top = Section(data, "", TOP_KEYS | INERT)
    _check_model_type(top, "kimi_k3")
    if not isinstance(data["text_config"], Mapping):
        raise value_error("text_config", data["text_config"], "an object")
    merged = dict(data["text_config"])
    for key in ("quantization_config", "tie_word_embeddings", *TOKENS):
        if key in data and merged.setdefault(key, data[key]) != data[key]:
            raise value_error(key, data[key], f"text_config.{key} = {merged[key]!r}")
    vision_config(data)
    text = Section(merged, "text_config.", TEXT_KEYS | MOE_KEYS | INERT)
    _check_model_type(text, "kimi_linear")
    return _read_text(text)


def vision_config(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `vision_config` object of a parsed `config.json`; None for a text-only checkpoint."""
    vision = data.get("vision_config")
    if vision is not None and not isinstance(vision, Mapping):
        raise value_error("vision_config", vision, "an object")
    return None if vision is None else dict(vision)


def _moe_to_hf(moe: MoEConfig | None) -> dict[str, Any]:
    if moe is None:
        return {"num_experts": None}
    if moe.shared_dim % moe.expert_dim:
        expected = f"a multiple of expert_dim = {moe.expert_dim} (the released layout counts shared experts)"
        raise value_error("MoEConfig.shared_dim", moe.shared_dim, expected)
    return FIXED_MOE | {
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.shared_dim // moe.expert_dim,
        "moe_intermediate_size": moe.expert_dim,
        "routed_expert_hidden_size": moe.latent_dim,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "moe_renormalize": moe.renormalize,
        "use_grouped_topk": True,
    }


def _linear_to_hf(config: K3Config) -> dict[str, Any]:
    kda = config.kda
    linear = {
        "head_dim": kda.head_dim,
        "num_heads": kda.num_heads,
        "short_conv_kernel_size": kda.conv_width,
        "use_full_rank_gate": True,
        "full_attn_layers": [i + 1 for i in config.mla_layers],
        "kda_layers": [i + 1 for i in range(config.num_layers) if not config.is_mla(i)],
    }
    return linear if kda.gate_lower_bound is None else linear | {"gate_lower_bound": kda.gate_lower_bound}


def _extensions_to_hf(config: K3Config) -> dict[str, Any]:
    values = {"latent_norm_eps": config.mla.latent_norm_eps}
    if config.moe is not None:
        values["quantile_bins"] = config.moe.quantile_bins
    changed = {key: value for key, value in values.items() if value != EXTENSIONS[key]}
    return {"k3_jax": changed} if changed else {}


def config_to_hf(
    config: K3Config, vision: Mapping[str, Any] | None = None, expert_format: str = "mxfp4"
) -> dict[str, Any]:
    """`config.json` in the released, nested form; `config_from_hf` of the result gives `config` back.

    Args:
        vision: a parsed `config.json` whose vision part is carried along.
        expert_format: how the routed experts are stored, "mxfp4" (adds the quantization_config) or "bfloat16".
    """
    if expert_format not in ("mxfp4", "bfloat16"):
        raise value_error("expert_format", expert_format, "'mxfp4' or 'bfloat16'")
    mla = config.mla
    tokens = {key: getattr(config, key) for key in TOKENS}
    text = FIXED_TEXT | tokens | _moe_to_hf(config.moe) | _extensions_to_hf(config)
    text |= {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "intermediate_size": config.dense_dim,
        "rms_norm_eps": config.norm_eps,
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "initializer_range": config.init_std,
        "max_position_embeddings": config.max_positions,
        "first_k_dense_replace": config.first_dense_layers,
        "attn_res_block_size": config.attn_res_block,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "linear_attn_config": _linear_to_hf(config),
    }
    if config.moe is not None and expert_format == "mxfp4":
        text["quantization_config"] = MXFP4_QUANTIZATION
    top = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16"}
    top |= tokens | {"ignore_index": -100, "tie_word_embeddings": False, "text_config": text}
    return top | {key: vision[key] for key in VISION_KEYS if vision is not None and key in vision}
