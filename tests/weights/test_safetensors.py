"""The container: the reference library reads what we write and the other way round; damage is named."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from k3_jax.weights.safetensors import (
    CheckpointError,
    SafetensorsFile,
    SafetensorsWriter,
    TensorInfo,
    read_all,
    write_safetensors,
)

TENSORS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array([1, -2.5], ml_dtypes.bfloat16),
    "u": np.arange(5, dtype=np.uint8),
    "i": np.array([[1], [-1]], np.int64),
    "scalar": np.array(2, np.int32),
    "empty": np.zeros((0, 3), np.float16),
}


def test_agrees_with_the_reference_library(tmp_path):
    write_safetensors(tmp_path / "ours", TENSORS)
    safetensors.numpy.save_file(TENSORS, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes()[8:9] == b"{"
    theirs = safetensors.numpy.load_file(tmp_path / "ours")
    for path in ("ours", "theirs"):
        ours = dict(read_all(tmp_path / path))
        assert ours.keys() == TENSORS.keys() == theirs.keys()
        for name, value in TENSORS.items():
            assert ours[name].dtype == value.dtype and ours[name].shape == value.shape
            assert ours[name].tobytes() == value.tobytes() == theirs[name].tobytes()


def test_slices_and_read_only(tmp_path):
    write_safetensors(tmp_path / "f", TENSORS)
    view = SafetensorsFile(tmp_path / "f").read("w")
    np.testing.assert_array_equal(view[1:3, 2], [6, 10])
    assert not view.flags.writeable


def raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DAMAGE = {
    "header length": (b"{}", b"", 1 << 40),
    "is not JSON": (b"{nonsense}", b"", None),
    "not a JSON object": (b"[1, 2]", b"", None),
    "tensor a: appears twice": (b'{"a": 1, "a": 2}', b"", None),
    "tensor a: dtype 'F33'": ({"a": entry("F33")}, bytes(8), None),
    "tensor a: 8 bytes for F32": ({"a": entry(shape=(3,))}, bytes(8), None),
    "tensor a: shape": ({"a": entry(shape=(-2,))}, bytes(8), None),
    "tensor a: data_offsets": ({"a": entry(offsets=(0, 4, 8))}, bytes(8), None),
    "tensor a: header entry": ({"a": {"dtype": "F32"}}, bytes(8), None),
    "tensor b: data_offsets overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), None),
    "tensor b: 4 unused bytes": ({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), None),
    "tensor a: its data ends at": ({"a": entry()}, bytes(7), None),
    "3 bytes after the last tensor": ({"a": entry()}, bytes(11), None),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named_with_file_and_tensor(tmp_path, message):
    path = raw(tmp_path / "model.safetensors", *DAMAGE[message])
    with pytest.raises(CheckpointError, match=message) as error:
        SafetensorsFile(path)
    assert "model.safetensors" in str(error.value)


def test_short_and_absent_files(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="truncated"):
        SafetensorsFile(tmp_path / "f")
    with pytest.raises(CheckpointError, match="no such file"):
        SafetensorsFile(tmp_path / "g")


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    writer = SafetensorsWriter(tmp_path / "f", {"a": TensorInfo("F32", (2,)), "b": TensorInfo("U8", (1,))})
    writer.write("a", np.zeros(2, np.float32))
    with pytest.raises(CheckpointError, match="tensor b: was not given"):
        writer.close()
    with pytest.raises(CheckpointError, match="tensor a: written twice"):
        writer.write("a", np.zeros(2, np.float32))
    with pytest.raises(CheckpointError, match=r"tensor b: float32 \[1\]: expected U8 \[1\]"):
        writer.write("b", np.zeros(1, np.float32))
    assert not (tmp_path / "f").exists()
    writer.abort()
    assert list(tmp_path.iterdir()) == []
