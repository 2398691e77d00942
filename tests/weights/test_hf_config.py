"""The released config.json: read, refused with the reason, written back."""

import copy
import json

import pytest

from k3_jax.config import ConfigError, K3Config, KDAConfig, MLAConfig, MoEConfig
from k3_jax.weights.hf_config import config_from_hf, config_to_hf, vision_config
from k3_jax.weights.hf_schema import INERT


@pytest.fixture
def tiny(golden) -> dict:
    return json.loads((golden / "k3_tiny_c" / "config.json").read_text())


@pytest.fixture
def released(shared) -> dict:
    return json.loads((shared / "golden" / "released" / "config.json").read_text())


def test_released(released):
    config = config_from_hf(released)
    assert config == K3Config(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        mla_layers=(*range(3, 92, 4), 92),  # P36: 0-based, the extra last layer included
        kda=KDAConfig(num_heads=96, head_dim=128, conv_width=4, gate_lower_bound=-5.0),
        mla=MLAConfig(96, 1536, 512, 128, 64, 128),
        dense_dim=33792,
        moe=MoEConfig(896, 16, 3584, 3072, 6144),
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,  # P47: from the file; the published class has 0
    )
    assert sum(not config.is_mla(i) for i in range(93)) == 69


def test_released_is_written_back_with_every_architecture_key(released):
    again = config_to_hf(config_from_hf(released), vision=released)
    for key, value in released["text_config"].items():
        assert key in INERT or again["text_config"][key] == value, key
    for key in released.keys() - {"text_config", "auto_map"}:
        assert again[key] == released[key], key
    assert vision_config(again) == released["vision_config"]


def check_round_trip(data: dict) -> None:
    config = config_from_hf(data)
    assert config.mla_layers == (3, 7, 11, 12)
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(data["text_config"]) == config
    assert config_from_hf(config_to_hf(config, expert_format="bfloat16")) == config


def test_round_trip(tiny):
    check_round_trip(tiny)


def test_round_trip_of_the_larger_checkpoint(shared):
    check_round_trip(json.loads((shared / "golden" / "k3_tiny_a" / "config.json").read_text()))


def test_round_trip_of_what_the_released_file_cannot_say():
    kda, mla = KDAConfig(2, 16, gate_lower_bound=None), MLAConfig(2, 8, 8, 8, 8, 8, latent_norm_eps=1e-5)
    moe = MoEConfig(4, 2, 32, 32, 32, quantile_bins=50)
    sparse = K3Config(64, 32, 3, (1,), kda, mla, 64, moe)
    dense = K3Config(64, 32, 3, (), kda, mla, 64, None, first_dense_layers=3)
    for config in (sparse, dense):
        assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    with pytest.raises(ConfigError, match=r"shared_dim = 33.*multiple of expert_dim = 32"):
        config_to_hf(K3Config(64, 32, 3, (1,), kda, mla, 64, MoEConfig(4, 2, 32, 32, 33)))


def test_absent_lower_bound_is_the_unbounded_gate(tiny):
    assert config_from_hf(tiny).kda.gate_lower_bound == -5.0
    del tiny["text_config"]["linear_attn_config"]["gate_lower_bound"]
    assert config_from_hf(tiny).kda.gate_lower_bound is None


def change(data: dict, path: str, value) -> dict:
    data = copy.deepcopy(data)
    *parents, key = path.split(".")
    section = data
    for parent in parents:
        section = section[parent]
    section[key] = value
    return data


REFUSED = {
    "num_expert_group": 2,
    "topk_group": 2,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "linear_attn_config.use_full_rank_gate": False,
    "latent_moe_use_norm": False,
    "hidden_act": "silu",
    "moe_router_activation_func": "softmax",
    "topk_method": "greedy",
    "moe_layer_freq": 2,
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 1,
    "num_key_value_heads": 1,
    "linear_attn_config.gate_lower_bound": -7.0,
    "num_experts_per_token": 4,
    "first_k_dense_replace": 14,
    "vocab_size": "128",
    "hidden_size": 64.0,
    "num_hidden_layers": True,
    "rms_norm_eps": "1e-5",
    "moe_renormalize": 1,
    "eos_token_id": 128,
    "num_shared_experts": 0,
    "model_type": "kimi_k2",
    "quantization_config.format": "pack-quantized",
    "quantization_config.config_groups.group_0.weights.group_size": 16,
    "quantization_config.config_groups.group_0.weights.num_bits": 8,
    "quantization_config.config_groups": {},
    "k3_jax": {"latent_norm_eps": "small"},
}


@pytest.mark.parametrize("path", REFUSED)
def test_refused_values_name_key_and_value(tiny, path):
    data = change(tiny, f"text_config.{path}", REFUSED[path])
    if path == "tie_word_embeddings":
        data[path] = True
    if path == "eos_token_id":
        data[path] = 128
    with pytest.raises(ConfigError) as error:
        config_from_hf(data)
    value = "small" if path == "k3_jax" else REFUSED[path]
    assert path.split(".")[-1] in str(error.value)
    assert repr(value) in str(error.value) and "expected" in str(error.value)


def test_every_architecture_key_is_required(tiny):
    optional = {"quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
    for key in tiny["text_config"].keys() - INERT - optional:
        data = copy.deepcopy(tiny)
        del data["text_config"][key]
        with pytest.raises(ConfigError, match=rf"text_config\.{key} is missing"):
            config_from_hf(data)
    del tiny["pad_token_id"], tiny["text_config"]["pad_token_id"]
    with pytest.raises(ConfigError, match="pad_token_id is missing"):
        config_from_hf(tiny)


def test_unknown_keys_are_errors_with_a_suggestion(tiny):
    with pytest.raises(ConfigError, match="hiden_size.*unknown key; did you mean 'hidden_size'"):
        config_from_hf(change(tiny, "text_config.hiden_size", 64))
    with pytest.raises(ConfigError, match="rope_interleave.*unknown key"):
        config_from_hf(change(tiny, "text_config.rope_interleave", True))
    with pytest.raises(ConfigError, match="linear_attn_config.num_head .*did you mean 'num_heads'"):
        config_from_hf(change(tiny, "text_config.linear_attn_config.num_head", 2))
    with pytest.raises(ConfigError, match="draft_config.*unknown key"):
        config_from_hf(change(tiny, "draft_config", {}))
    config_from_hf(change(tiny, "text_config.temperature", 0.6))  # boilerplate


LAYER_LISTS = {
    "0-based": (lambda kda, mla: ([i - 1 for i in kda], [i - 1 for i in mla]), "contains 0: layer lists are 1-based"),
    "past the end": (lambda kda, mla: (kda, [*mla, 14]), "contains 14: layer lists are 1-based, 1..13"),
    "overlap": (lambda kda, mla: ([*kda, 4], mla), "layer 4 is in both lists.*1-based"),
    "gap": (lambda kda, mla: (kda, [4, 8, 12]), "layer 13 is in neither list.*1-based"),
    "twice": (lambda kda, mla: (kda, [*mla, 4]), "contains 4 twice"),
    "not a list": (lambda kda, mla: (kda, "4,8"), "expected a list of 1-based"),
}


@pytest.mark.parametrize("name", LAYER_LISTS)
def test_layer_lists_are_one_based_and_partition_the_layers(tiny, name):
    wrong, message = LAYER_LISTS[name]
    linear = tiny["text_config"]["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = wrong(linear["kda_layers"], linear["full_attn_layers"])
    with pytest.raises(ConfigError, match=message):
        config_from_hf(tiny)


def test_the_two_levels_must_agree(tiny):
    with pytest.raises(ConfigError, match=r"eos_token_id = 3.*text_config.eos_token_id = 126"):
        config_from_hf(change(tiny, "eos_token_id", 3))
    for key in ("pad_token_id", "tie_word_embeddings"):
        del tiny["text_config"][key]
    assert config_from_hf(tiny).pad_token_id == 127
    with pytest.raises(ConfigError, match="text_config is missing"):
        config_from_hf({"model_type": "kimi_k3"})
    with pytest.raises(ConfigError, match="vision_config = 3"):
        config_from_hf(change(tiny, "vision_config", 3))
