"""Released checkpoints: loaded against an independent reading, saved back, and refused with the reason."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from k3_jax.config import ConfigError
from k3_jax.weights.released import (
    CheckpointError,
    ReleasedCheckpoint,
    is_released,
    load_released,
    read_config,
    save_released,
)

LAYER = "language_model.model.layers."
EXPERT = f"{LAYER}1.block_sparse_moe.experts.2.w1"


def stored(folder: Path) -> dict[str, np.ndarray]:
    """The tensors as the reference library reads them."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """An MXFP4 matrix [out, in], written for clarity: low nibble first, one scale for 32 inputs."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    out = np.empty((packed.shape[0], packed.shape[1] * 2), np.float32)
    out[:, 0::2], out[:, 1::2] = values[packed & 15], values[packed >> 4]
    return out * np.repeat(np.exp2(scale.astype(np.float32) - 127), 32, axis=1)


@pytest.fixture
def tiny(golden) -> Path:
    return golden / "k3_tiny_c"


@pytest.fixture
def single(tiny, tmp_path):
    """`single(tensors)` writes them as one model.safetensors with the tiny config, and returns the folder."""

    def write(tensors: dict[str, np.ndarray]) -> Path:
        folder = tmp_path / "single"
        folder.mkdir()
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        shutil.copy(tiny / "config.json", folder)
        return folder

    return write


def assert_equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names=None) -> None:
    assert a.keys() == b.keys()
    for name in names or a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name


def test_values_dtypes_and_order(tiny):
    raw, named = stored(tiny), list(load_released(tiny, read_config(tiny)))
    loaded = dict(named)
    assert len(loaded) == len(named) == 376
    layers = [int(name.split(".")[1]) for name, _ in named if name.startswith("layers.")]
    assert layers == sorted(layers)
    q = raw[f"{LAYER}0.self_attn.q_proj.weight"]
    assert loaded["layers.0.kda.q"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(loaded["layers.0.kda.q"][:, 1, 3], q[19])
    np.testing.assert_array_equal(loaded["embed"], raw["language_model.model.embed_tokens.weight"])
    float32 = {n.split(".", 2)[2] for n, a in named if a.dtype == np.float32}
    assert float32 == {
        *("kda.q_conv", "kda.k_conv", "kda.v_conv", "kda.A_log", "kda.dt_bias", "kda.o_norm", "moe.router_bias")
    }
    bias = raw[f"{LAYER}1.block_sparse_moe.gate.e_score_correction_bias"]  # P5: never through bfloat16
    assert loaded["layers.1.moe.router_bias"].tobytes() == bias.tobytes()
    assert loaded["layers.0.kda.A_log"].tobytes() == raw[f"{LAYER}0.self_attn.A_log"][:2].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_experts_against_an_independent_unpacking(tiny, dtype):
    raw, loaded = stored(tiny), dict(load_released(tiny, read_config(tiny), dtype))
    for layer, expert, w in ((1, 0, "w1"), (4, 3, "w2"), (12, 1, "w3")):
        base = f"{LAYER}{layer}.block_sparse_moe.experts.{expert}.{w}"
        packed, scale = raw[f"{base}.weight_packed"], raw[f"{base}.weight_scale"]
        got = loaded[f"layers.{layer}.moe.{w}"][expert]
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(np.float32), unpack(packed, scale).T)
        # P24: the wrong nibble order has the same group statistics; only values show it
        swapped = unpack((packed << 4) | (packed >> 4), scale).T
        assert (got.astype(np.float32) != swapped).mean() > 0.5


def test_one_file_without_index(tiny, single):
    config = read_config(tiny)
    folder = single(stored(tiny))
    assert is_released(folder) and read_config(folder) == config
    assert_equal(dict(load_released(folder, config)), dict(load_released(tiny, config)))


def test_plain_experts_are_told_by_their_tensors(tiny, single):
    tensors, config = stored(tiny), read_config(tiny)  # P26: config.json still says that Linear is quantized
    packed, scale = tensors.pop(f"{EXPERT}.weight_packed"), tensors.pop(f"{EXPERT}.weight_scale")
    tensors[f"{EXPERT}.weight"] = unpack(packed, scale).astype(ml_dtypes.bfloat16)
    checkpoint = ReleasedCheckpoint(single(tensors), config)
    assert_equal({"w": checkpoint.read("layers.1.moe.w1")}, {"w": dict(load_released(tiny, config))["layers.1.moe.w1"]})
    with pytest.raises(CheckpointError, match="experts.2.w1.weight: expected MXFP4"):
        checkpoint.read_packed("layers.1.moe.w1", 0, 4)


def test_experts_in_part(tiny):
    checkpoint = ReleasedCheckpoint(tiny, read_config(tiny))
    whole = checkpoint.read("layers.2.moe.w2")
    np.testing.assert_array_equal(checkpoint.read_experts("layers.2.moe.w2", 1, 3), whole[1:3])
    packed, scale = checkpoint.read_packed("layers.2.moe.w2", 1, 3)
    np.testing.assert_array_equal(unpack(packed[1], scale[1]).T, whole[2].astype(np.float32))


def _drop(name):
    return lambda t: t.pop(name)


def _set(name, change):
    return lambda t: t.update({name: np.ascontiguousarray(change(t[name]))})


A_LOG = f"{LAYER}5.self_attn.A_log"
Q_PROJ = f"{LAYER}0.self_attn.q_proj.weight"
REFUSED = {
    "missing": (_drop(Q_PROJ), f"{Q_PROJ}: missing"),
    "missing scale": (_drop(f"{EXPERT}.weight_scale"), f"{EXPERT}.weight_scale: missing"),
    "missing packed": (_drop(f"{EXPERT}.weight_packed"), f"{EXPERT}.weight_packed: missing"),
    "extra": (lambda t: t.update({"x.bias": np.zeros(1, np.float32)}), "x.bias: not a tensor of this model"),
    "both formats": (
        lambda t: t.update({f"{EXPERT}.weight": np.zeros((32, 32), ml_dtypes.bfloat16)}),
        f"{EXPERT}.weight: not a tensor of this model",
    ),
    "shape": (_set(Q_PROJ, np.transpose), r"q_proj.weight: shape \[64, 32\]: expected \[32, 64\]"),
    "dtype": (_set(Q_PROJ, lambda a: a.astype(np.float32)), "q_proj.weight: dtype F32: expected BF16"),
    "bias in bf16": (
        _set(f"{LAYER}1.block_sparse_moe.gate.e_score_correction_bias", lambda a: a.astype(ml_dtypes.bfloat16)),
        "e_score_correction_bias: dtype BF16: expected F32",
    ),
    "float scale": (
        _set(f"{EXPERT}.weight_scale", lambda a: a.astype(np.float32)),
        "weight_scale: dtype F32: expected U8",
    ),
    "tail of A_log": (_set(A_LOG, lambda a: a + 1e-30), f"{A_LOG}: expected zeros after its 2 heads"),
    "short A_log": (_set(A_LOG, lambda a: a[:1]), r"A_log: shape \[1\]: expected \[32\]"),
    "NaN scale": (_set(f"{EXPERT}.weight_scale", lambda a: a | 255), f"{EXPERT}.weight_scale: scale.* = 255"),
    "vision without config": (
        lambda t: t.update({"mm_projector.post_norm.weight": np.zeros(64, ml_dtypes.bfloat16)}),
        "mm_projector.post_norm.weight: not a tensor of this model",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_tensor_and_file(tiny, single, name):
    damage, message = REFUSED[name]
    tensors = stored(tiny)
    damage(tensors)
    folder = single(tensors)
    with pytest.raises(CheckpointError, match=message) as error:
        dict(load_released(folder, read_config(tiny)))
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize("tail", [0, 14, 126])
def test_any_length_of_zeros_after_a_log(tiny, single, tail):
    tensors, config = stored(tiny), read_config(tiny)
    tensors[A_LOG] = np.pad(tensors[A_LOG][:2], (0, tail))
    loaded = dict(load_released(single(tensors), config))
    assert loaded["layers.5.kda.A_log"].tobytes() == tensors[A_LOG][:2].tobytes()


def test_several_files_and_their_index(tiny, tmp_path):
    config = read_config(tiny)

    def refuse(change, message):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(tiny, folder)
        change(folder)
        with pytest.raises(CheckpointError, match=message):
            dict(load_released(folder, config))

    third = "model-00003-of-000004.safetensors"

    def edit_index(change):
        def edit(folder):
            path = folder / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            change(index["weight_map"])
            path.write_text(json.dumps(index))

        return edit

    def duplicate(folder):
        tensors = safetensors.numpy.load_file(folder / third)
        safetensors.numpy.save_file(tensors | {Q_PROJ: stored(tiny)[Q_PROJ]}, folder / third)

    def truncate(folder):
        (folder / third).write_bytes((folder / third).read_bytes()[:-1])

    refuse(lambda f: (f / third).unlink(), f"{third}: no such file")
    refuse(truncate, f"{third}: tensor .*truncated")
    refuse(duplicate, f"{third}: tensor {Q_PROJ}: is also in model-00002")
    refuse(edit_index(lambda m: m.pop(Q_PROJ)), f"model-00002.*tensor {Q_PROJ}: is not listed")
    refuse(edit_index(lambda m: m.update({Q_PROJ: third})), f"{third}: tensor {Q_PROJ}: missing")
    refuse(edit_index(lambda m: m.update({"ghost": third})), f"{third}: tensor ghost: missing")
    refuse(edit_index(lambda m: m.update({Q_PROJ: "../x"})), "expected a file of this directory")
    refuse(lambda f: (f / "model.safetensors.index.json").write_text("{"), "cannot be read as JSON")
    refuse(lambda f: (f / "model.safetensors.index.json").unlink(), "holds neither model.safetensors.index.json nor")


def test_what_is_a_released_checkpoint(tiny, tmp_path):
    assert is_released(tiny) and not is_released(tmp_path) and not is_released(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {}}')
    with pytest.raises(ConfigError, match=r"config.json: text_config\.\w+ is missing"):
        read_config(tmp_path)


def test_save_gives_the_same_bytes(tiny, tmp_path):
    config = read_config(tiny)
    loaded = dict(load_released(tiny, config))
    save_released(tmp_path / "plain", config, loaded)
    save_released(tmp_path / "like", config, iter(loaded.items()), like=tiny)
    assert_equal(stored(tmp_path / "like"), stored(tiny))
    assert_equal(dict(load_released(tmp_path / "plain", config)), loaded)
    # Without `like`, only groups whose largest code is below 4.0 may be packed differently (the values are the same).
    before, after = stored(tiny), stored(tmp_path / "plain")
    assert_equal(after, before, [name for name in before if not name.endswith(("_packed", "_scale"))])
    differ = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert {name.rsplit(".", 1)[0] for name in differ} == {f"{LAYER}5.block_sparse_moe.experts.0.w3"}
    assert read_config(tmp_path / "plain") == config
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files[0] == "config.json" and len(files) == 14 + 2 and files[1] == "model-00001-of-000014.safetensors"
    index = json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in after.values())
    assert index["weight_map"].keys() == before.keys()


def test_larger_checkpoint_round_trip(shared, tmp_path):
    folder = shared / "golden" / "k3_tiny_a"
    config = read_config(folder)
    loaded = dict(load_released(folder, config))
    save_released(tmp_path / "again", config, loaded, like=folder)
    assert_equal(stored(tmp_path / "again"), stored(folder))


def test_save_changed_experts_and_jax_arrays(tiny, tmp_path):
    config = read_config(tiny)
    loaded = dict(load_released(tiny, config, np.float32))
    shape = loaded["layers.1.moe.w1"].shape
    loaded["layers.1.moe.w1"] = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
    loaded["embed"] = jnp.asarray(loaded["embed"].astype(np.float32))
    save_released(tmp_path / "x", config, loaded, like=tiny)
    before, after = stored(tiny), stored(tmp_path / "x")
    changed = {name.rsplit(".", 1)[0] for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {f"{LAYER}1.block_sparse_moe.experts.{e}.w1" for e in range(4)}
    again = dict(load_released(tmp_path / "x", config, np.float32))["layers.1.moe.w1"]
    error = again - np.asarray(loaded["layers.1.moe.w1"])
    assert 0.10 < np.sqrt((error**2).mean()) < 0.13  # the grid costs a Gaussian 11.5 %


def test_plain_export_of_experts(tiny, tmp_path):
    config = read_config(tiny)
    loaded = dict(load_released(tiny, config))
    save_released(tmp_path / "x", config, loaded, expert_format="bfloat16")
    assert f"{EXPERT}.weight" in stored(tmp_path / "x")
    assert "quantization_config" not in json.loads((tmp_path / "x" / "config.json").read_text())["text_config"]
    assert_equal(dict(load_released(tmp_path / "x", config)), loaded)


SAVE_ERRORS = {
    "missing": (lambda n: n.pop("layers.3.mla.g"), "layers.3.mla.g: was not given"),
    "unknown": (lambda n: n.update({"layers.3.mla.z": n["norm"]}), "layers.3.mla.z: not a parameter"),
    "shape": (lambda n: n.update(norm=n["norm"][:-1]), r"norm: bfloat16 \[63\]: expected floats \[64\]"),
    "integers": (lambda n: n.update(norm=np.zeros(64, np.int32)), "norm: int32"),
    "NaN": (lambda n: n.update({"layers.1.moe.w2": n["layers.1.moe.w2"] * np.nan}), "layers.1.moe.w2: .*not finite"),
}


@pytest.mark.parametrize("name", SAVE_ERRORS)
def test_a_failed_save_leaves_nothing(tiny, tmp_path, name):
    damage, message = SAVE_ERRORS[name]
    config = read_config(tiny)
    named = dict(load_released(tiny, config))
    damage(named)
    with pytest.raises(CheckpointError, match=message):
        save_released(tmp_path / "x", config, named)
    assert list((tmp_path / "x").iterdir()) == []


def test_save_does_not_overwrite(tiny):
    with pytest.raises(ConfigError, match="new or empty directory"):
        save_released(tiny, read_config(tiny), {})


def test_vision_tensors_are_checked_skipped_and_carried(tiny, golden, single, tmp_path):
    vision = json.loads((golden / "vision_tiny_a" / "config.json").read_text())["vision_config"]
    config, tensors = read_config(tiny), stored(tiny) | stored(golden / "vision_tiny_a")
    folder = single(tensors)
    data = json.loads((folder / "config.json").read_text()) | {"vision_config": vision}
    (folder / "config.json").write_text(json.dumps(data))
    loaded = dict(load_released(folder, config))
    assert_equal(loaded, dict(load_released(tiny, config)))
    save_released(tmp_path / "again", config, loaded, like=folder)
    assert_equal(stored(tmp_path / "again"), tensors)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["vision_config"] == vision
    del tensors["mm_projector.proj.0.weight"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="mm_projector.proj.0.weight: missing"):
        dict(load_released(folder, config))
