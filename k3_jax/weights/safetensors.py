"""The safetensors container: 8 bytes of header length, a JSON header, then the tensors' bytes without gaps.

Reading maps the file, so a tensor (or a slice of one) costs only the pages that are touched. The header is checked
strictly: whatever is wrong is reported with the file's and the tensor's name before any value is used.
"""

import functools
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k3_jax.config import ConfigError

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 1 << 28  # bytes; a longer header is garbage read as a length


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used as it is; the message names the tensor and the file."""


@dataclass(frozen=True)
class TensorInfo:
    """`begin` and `end` are byte offsets within the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @functools.cached_property
    def nbytes(self) -> int:
        return _size(self.shape) * DTYPES[self.dtype].itemsize


def _size(shape: tuple[int, ...]) -> int:
    total = 1  # Python integers: a hostile shape must not wrap around
    for dim in shape:
        total *= dim
    return total


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for json: a name that appears twice is an error, not a silent overwrite."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise CheckpointError(f"{twice}: appears twice")
    return result


class SafetensorsFile:
    """A read-only view of one file: `infos` by name; `read(name)` maps the tensor, `file.read(name)[3:5]` a slice."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: no such file")
        size = self.path.stat().st_size
        header, start = self._read_header(size)
        self.infos = {name: self._tensor_info(name, entry, start) for name, entry in header.items()}
        self._check_layout(start, size)
        self._bytes: np.ndarray = np.memmap(self.path, np.uint8, "r")

    def _fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _read_header(self, size: int) -> tuple[dict[str, Any], int]:
        with open(self.path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise self._fail(f"header length {length} in a file of {size} bytes: truncated or not safetensors")
            text = file.read(length)
        try:
            header = json.loads(text, object_pairs_hook=unique_pairs)
        except CheckpointError as error:
            raise self._fail(f"tensor {error}") from None
        except ValueError as error:
            raise self._fail(f"the header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._fail("the header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        self.metadata: dict[str, str] = metadata if isinstance(metadata, dict) else {}
        return header, 8 + length

    def _tensor_info(self, name: str, entry: Any, start: int) -> TensorInfo:
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise self._fail(f"tensor {name}: header entry {entry!r}: expected dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise self._fail(f"tensor {name}: dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
        for label, value in (("shape", shape), ("data_offsets", offsets)):
            if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
                raise self._fail(f"tensor {name}: {label} {value!r}: expected a list of non-negative integers")
        if len(offsets) != 2:
            raise self._fail(f"tensor {name}: data_offsets {offsets!r}: expected [begin, end]")
        info = TensorInfo(dtype, tuple(shape), start + offsets[0], start + offsets[1])
        if info.end - info.begin != info.nbytes:
            raise self._fail(
                f"tensor {name}: {info.end - info.begin} bytes for {dtype} {shape}: expected {info.nbytes}"
            )
        return info

    def _check_layout(self, start: int, size: int) -> None:
        position = start
        for name, info in sorted(self.infos.items(), key=lambda item: (item[1].begin, item[1].end)):
            if info.begin < position:
                raise self._fail(f"tensor {name}: data_offsets overlap the tensor before it")
            if info.begin > position:
                raise self._fail(f"tensor {name}: {info.begin - position} unused bytes before its data")
            if info.end > size:
                raise self._fail(f"tensor {name}: its data ends at byte {info.end} of {size}: the file is truncated")
            position = info.end
        if position != size:
            raise self._fail(f"{size - position} bytes after the last tensor")

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file; slice it to read less, copy it to keep it."""
        if name not in self.infos:
            raise self._fail(f"tensor {name}: not in this file")
        info = self.infos[name]
        return self._bytes[info.begin : info.end].view(DTYPES[info.dtype]).reshape(info.shape)


class SafetensorsWriter:
    """Writes one file, tensor by tensor in any order; nothing stands under `path` before `close` has succeeded.

    Args:
        infos: dtype and shape of every tensor; offsets are assigned here, widest dtype first, then by name.
    """

    def __init__(
        self, path: str | os.PathLike, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str] | None = None
    ):
        self.path = Path(path)
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
        order = sorted(infos, key=lambda name: (-DTYPES[infos[name].dtype].itemsize, name))
        self.infos: dict[str, TensorInfo] = {}
        position = 0
        for name in order:
            info = infos[name]
            self.infos[name] = TensorInfo(info.dtype, info.shape, position, position + info.nbytes)
            header[name] = {"dtype": info.dtype, "shape": list(info.shape)}
            header[name]["data_offsets"] = [position, position + info.nbytes]
            position += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._missing = set(order)
        self._file = open(self._temporary, "wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.truncate(self._start + position)

    @property
    def missing(self) -> set[str]:
        """Names that have not been written yet."""
        return set(self._missing)

    def write(self, name: str, array: np.ndarray) -> None:
        if name not in self._missing:
            raise CheckpointError(f"{self.path}: tensor {name}: written twice or not in this file")
        info = self.infos[name]
        if array.dtype != DTYPES[info.dtype] or array.shape != info.shape:
            given, expected = f"{array.dtype} {list(array.shape)}", f"{info.dtype} {list(info.shape)}"
            raise CheckpointError(f"{self.path}: tensor {name}: {given}: expected {expected}")
        self._file.seek(self._start + info.begin)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._missing.discard(name)

    def close(self) -> None:
        if self._missing:
            raise CheckpointError(f"{self.path}: tensor {min(self._missing)}: was not given")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self.path)

    def abort(self) -> None:
        """Drops the unfinished file."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_safetensors(path: str | os.PathLike, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes all of `tensors` into one file, atomically."""
    infos = {}
    for name, array in tensors.items():
        if array.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{path}: tensor {name}: dtype {array.dtype} has no name in safetensors")
        infos[name] = TensorInfo(_DTYPE_NAMES[array.dtype], tuple(array.shape))
    writer = SafetensorsWriter(path, infos)
    try:
        for name, array in tensors.items():
            writer.write(name, array)
        writer.close()
    except BaseException:
        writer.abort()
        raise


def read_all(path: str | os.PathLike) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a file, in the order of its header."""
    file = SafetensorsFile(path)
    for name in file.infos:
        yield name, file.read(name)
