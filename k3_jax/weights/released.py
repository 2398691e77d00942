"""Loading and saving checkpoints in the released Hugging Face layout, one parameter at a time."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k3_jax.config import ConfigError, K3Config
from k3_jax.dtypes import mxfp4_encode
from k3_jax.weights.hf_config import config_to_hf, vision_config
from k3_jax.weights.names import MXFP4, Parameter, shard_name, shards
from k3_jax.weights.reader import CONFIG, INDEX, ReleasedCheckpoint, is_released, read_config, read_config_json
from k3_jax.weights.safetensors import DTYPES, CheckpointError, SafetensorsWriter, TensorInfo

__all__ = ["CheckpointError", "ReleasedCheckpoint", "is_released", "load_released", "read_config", "save_released"]

_FLOATS = frozenset(np.dtype(d) for d in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16))


def load_released(
    directory: str | os.PathLike, config: K3Config, expert_dtype=ml_dtypes.bfloat16
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (canonical name, array) of every parameter: layers in order, then the top level.

    All headers are checked before the first value is yielded; afterwards one parameter at a time is in memory (the
    largest is one stack of experts). Experts are decoded exactly to `expert_dtype`; everything else keeps the dtype
    that is stored, bfloat16 or float32. Vision tensors named by `config.json` are checked and skipped.

    Raises:
        CheckpointError: a missing, extra or duplicate tensor, a wrong shape or dtype, a missing or truncated file, a
            tail of A_log that is not zero, a NaN scale. The message names tensor and file.
    """
    checkpoint = ReleasedCheckpoint(directory, config)
    for name in checkpoint.parameters:
        yield name, checkpoint.read(name, expert_dtype)


class _Saver:
    """The open files of one `save_released` call; a file is finished when its last tensor has arrived."""

    def __init__(
        self, directory: Path, files: list[list[Parameter]], expert_format: str, like: ReleasedCheckpoint | None
    ):
        self.directory, self.expert_format, self.like = directory, expert_format, like
        self.names = [shard_name(i, len(files)) for i in range(len(files))]
        self.files = files
        self.home = {parameter.name: i for i, file in enumerate(files) for parameter in file}
        self.pending = {parameter.name: parameter for file in files for parameter in file}
        self.writers: dict[int, SafetensorsWriter] = {}
        self.weight_map: dict[str, str] = {}
        self.total_size = 0

    def _infos(self, parameter: Parameter) -> dict[str, TensorInfo]:
        if parameter.row.dtype == MXFP4 and self.expert_format == "bfloat16":
            plain = TensorInfo("BF16", parameter.stored_shape)
            return {f"{parameter.expert(i)}.weight": plain for i in range(parameter.experts)}
        infos = dict(parameter.infos())
        if parameter.is_padded and self.like is not None:
            infos[parameter.stored] = self.like.files[parameter.stored].infos[parameter.stored]
        return infos

    def _writer(self, index: int) -> SafetensorsWriter:
        if index not in self.writers:
            infos = {k: v for parameter in self.files[index] for k, v in self._infos(parameter).items()}
            self.writers[index] = SafetensorsWriter(self.directory / self.names[index], infos)
            self.weight_map |= dict.fromkeys(infos, self.names[index])
            self.total_size += sum(info.nbytes for info in infos.values())
        return self.writers[index]

    def put(self, name: str, array: np.ndarray) -> None:
        if name not in self.pending:
            problem = "given twice" if name in self.home else "not a parameter of this model"
            raise CheckpointError(f"{self.directory}: {name}: {problem}")
        parameter = self.pending.pop(name)
        if array.shape != parameter.shape or array.dtype not in _FLOATS:
            given = f"{array.dtype} {list(array.shape)}"
            raise CheckpointError(f"{self.directory}: {name}: {given}: expected floats {list(parameter.shape)}")
        writer = self._writer(self.home[name])
        if parameter.experts:
            for index in range(parameter.experts):
                self._put_expert(writer, parameter, index, array[index])
        else:
            stored = parameter.to_stored(array.astype(DTYPES[parameter.row.dtype]))
            if parameter.is_padded:  # the checkpoint this one is made like may have another length of tail
                stored, live = np.zeros(writer.infos[parameter.stored].shape, stored.dtype), stored[: len(array)]
                stored[: len(live)] = live
            writer.write(parameter.stored, stored)
        self._finish(self.home[name])

    def put_vision(self, parameter: Parameter, like: ReleasedCheckpoint) -> None:
        index = self.home[parameter.name]
        self.pending.pop(parameter.name)
        self._writer(index).write(parameter.stored, like.read_stored(parameter.stored))
        self._finish(index)

    def _put_expert(self, writer: SafetensorsWriter, parameter: Parameter, index: int, array: np.ndarray) -> None:
        base, stored = parameter.expert(index), parameter.to_stored(array)
        if self.expert_format == "bfloat16":
            writer.write(f"{base}.weight", stored.astype(ml_dtypes.bfloat16))
            return
        packed, scale = self._unchanged(parameter, index, array) or self._encode(parameter, stored)
        writer.write(f"{base}.weight_packed", packed)
        writer.write(f"{base}.weight_scale", scale)

    def _encode(self, parameter: Parameter, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        try:
            return mxfp4_encode(stored)
        except ValueError as error:
            raise CheckpointError(f"{self.directory}: {parameter.name}: {error}") from None

    def _unchanged(self, parameter: Parameter, index: int, array: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """The bytes of the checkpoint this one is made like, if they decode to exactly this expert."""
        if self.like is None or not self.like.is_packed(parameter.expert(index)):
            return None
        before = self.like.read_experts(parameter.name, index, index + 1, array.dtype)[0]
        if before.tobytes() != np.ascontiguousarray(array).tobytes():
            return None
        packed, scale = self.like.read_packed(parameter.name, index, index + 1)
        return packed[0], scale[0]

    def _finish(self, index: int) -> None:
        if not self.writers[index].missing:
            self.writers[index].close()

    def undo(self) -> None:
        """Removes everything this call has written."""
        for index, writer in self.writers.items():
            writer.abort()
            (self.directory / self.names[index]).unlink(missing_ok=True)


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def save_released(
    directory: str | os.PathLike,
    config: K3Config,
    named: Mapping[str, Any] | Iterable[tuple[str, Any]],
    *,
    expert_format: str = "mxfp4",
    like: str | os.PathLike | None = None,
) -> None:
    """Writes a checkpoint in the released layout: one file per layer, one for the top level, index and config.

    Args:
        named: canonical names and arrays (NumPy or JAX), in any order; a layer's file stays open until the layer is
            complete, so layer by layer is the economical order. Values are rounded to the dtype that is stored.
        expert_format: "mxfp4" packs the experts, which is exact only for values on the grid (a loaded or QAT-trained
            checkpoint); "bfloat16" stores them plainly.
        like: a released checkpoint of the same model. Its vision tensors are copied, and experts that have not changed
            keep its very bytes (equal values can have several MXFP4 encodings, so packing alone cannot promise that).

    Raises:
        CheckpointError: a parameter is missing, unknown, given twice or has another shape. Nothing is left behind then.
        ConfigError: the directory already holds a checkpoint.
    """
    path = Path(directory)
    if is_released(path):
        raise ConfigError(f"{path}: already holds safetensors files: expected a new or empty directory")
    source = None if like is None else ReleasedCheckpoint(like, config)
    original = read_config_json(like) if source is not None and source.vision else None
    data = config_to_hf(config, original, expert_format)
    path.mkdir(parents=True, exist_ok=True)
    saver = _Saver(path, shards(config, vision_config(data)), expert_format, source)
    try:
        for name, array in named.items() if isinstance(named, Mapping) else named:
            saver.put(name, np.asarray(array))
        for parameter in source.vision if source is not None else ():
            saver.put_vision(parameter, source)
        if saver.pending:
            raise CheckpointError(f"{path}: {next(iter(saver.pending))}: was not given")
    except BaseException:
        saver.undo()
        raise
    _write_json(path / CONFIG, data)
    index = {"metadata": {"total_size": saver.total_size}, "weight_map": dict(sorted(saver.weight_map.items()))}
    _write_json(path / INDEX, index)
