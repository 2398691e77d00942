"""The name table against the released index: the same 497,220 names, files and bytes."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from k3_jax.config import ConfigError
from k3_jax.weights.hf_config import config_from_hf
from k3_jax.weights.names import padded_heads, shard_name, shards, text_parameters, top_parameters, vision_parameters
from k3_jax.weights.safetensors import DTYPES


def test_released_names_files_and_bytes(shared):
    folder = shared / "golden" / "released"
    data = json.loads((folder / "config.json").read_text())
    with gzip.open(folder / "model.safetensors.index.json.gz") as file:
        index = json.load(file)
    files = shards(config_from_hf(data), data["vision_config"])
    names, total = {}, 0
    for number, parameters in enumerate(files):
        for parameter in parameters:
            for name, info in parameter.infos():
                assert name not in names
                names[name] = shard_name(number, len(files))
                total += info.nbytes
    assert len(names) == 497_220
    assert names == index["weight_map"]
    assert total == index["metadata"]["total_size"] == 1_560_860_324_864
    assert [len([n for p in f for n in p.infos()]) for f in files[:4]] == [23, 5404, 5404, 5398]


def check_shapes_and_dtypes(folder: Path) -> None:
    config = config_from_hf(json.loads((folder / "config.json").read_text()))
    ours = {n: (DTYPES[i.dtype], i.shape) for p in text_parameters(config) for n, i in p.infos()}
    theirs = {}
    for path in folder.glob("*.safetensors"):
        theirs |= {n: (a.dtype, a.shape) for n, a in safetensors.numpy.load_file(path).items()}
    assert ours == theirs


def test_shapes_and_dtypes(golden):
    check_shapes_and_dtypes(golden / "k3_tiny_c")


def test_shapes_and_dtypes_of_the_larger_checkpoint(shared):
    check_shapes_and_dtypes(shared / "golden" / "k3_tiny_a")


def test_vision_names(golden):
    folder = golden / "vision_tiny_a"
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    tower, projector = vision_parameters(vision)
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    assert {n: i.shape for p in tower + projector for n, i in p.infos()} == {n: a.shape for n, a in stored.items()}
    with pytest.raises(ConfigError, match="vision_config.vt_hidden_size = None"):
        vision_parameters({k: v for k, v in vision.items() if k != "vt_hidden_size"})


def test_canonical_names_and_shapes(golden):
    config = config_from_hf(json.loads((golden / "k3_tiny_c" / "config.json").read_text()))
    shapes = {p.name: p.shape for p in text_parameters(config)}
    expected = {
        "layers.0.kda.q": (64, 2, 16),
        "layers.0.kda.k_conv": (4, 2, 16),
        "layers.0.kda.dt_bias": (2, 16),
        "layers.0.kda.A_log": (2,),
        "layers.0.kda.f_b": (16, 2, 16),
        "layers.0.kda.o": (2, 16, 64),
        "layers.0.dense.down": (96, 64),
        "layers.0.attn_res.query": (64,),
        "layers.3.mla.q_b": (24, 2, 24),
        "layers.3.mla.kv_a": (64, 24),
        "layers.3.mla.kv_b": (16, 2, 32),
        "layers.3.mla.o": (2, 16, 64),
        "layers.1.moe.router": (64, 4),
        "layers.1.moe.w1": (4, 32, 32),
        "layers.1.moe.latent_up": (32, 64),
        "layers.1.moe.shared.gate": (64, 64),
        "embed": (128, 64),
        "lm_head": (64, 128),
    }
    assert expected.items() <= shapes.items()
    assert len(shapes) == 13 * 6 + 9 * 14 + 4 * 8 + 3 + 12 * 11 + 5
    assert {p.name for p in top_parameters(config)} == {
        "embed",
        "norm",
        "lm_head",
        "output_attn_res.norm",
        "output_attn_res.query",
    }


def test_axis_orders_are_inverse_and_head_major(golden):
    config = config_from_hf(json.loads((golden / "k3_tiny_c" / "config.json").read_text()))
    parameters = {p.name: p for p in text_parameters(config)}
    rng = np.random.default_rng(0)
    for parameter in parameters.values():
        stored = rng.standard_normal(parameter.stored_shape)
        if parameter.is_padded:
            stored[parameter.shape[0] :] = 0
        memory = parameter.to_memory(stored)
        assert memory.shape == parameter.shape[1 if parameter.experts else 0 :]
        np.testing.assert_array_equal(parameter.to_stored(memory), stored, strict=True)
    q = rng.standard_normal((32, 64))
    assert parameters["layers.0.kda.q"].to_memory(q)[5, 1, 3] == q[1 * 16 + 3, 5]
    conv = rng.standard_normal((32, 1, 4))
    assert parameters["layers.0.kda.q_conv"].to_memory(conv)[3, 1, 2] == conv[18, 0, 3]  # tap 3: the current token
    kv_b = rng.standard_normal((64, 16))
    assert parameters["layers.3.mla.kv_b"].to_memory(kv_b)[7, 1, 20] == kv_b[1 * 32 + 20, 7]
    o = rng.standard_normal((64, 32))
    assert parameters["layers.3.mla.o"].to_memory(o)[1, 4, 9] == o[9, 20]


def test_padding_of_a_log():
    assert [padded_heads(h) for h in (2, 4, 32, 33, 96)] == [32, 32, 32, 64, 128]
