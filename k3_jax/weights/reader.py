"""An opened checkpoint in the released Hugging Face layout.

Reading is strict in both directions: every tensor the model needs must be there with its shape and dtype, and nothing
else may be, except the vision tensors that the directory's `config.json` describes, which are checked and skipped
(all of them or none). A value that would load and be wrong (a missing scale, a non-zero tail of A_log, a NaN scale)
is an error. Each expert is packed or plain as its own tensors say, never as the quantization's ignore list says.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import UInt8

from k3_jax.config import ConfigError, K3Config
from k3_jax.dtypes import mxfp4_decode
from k3_jax.weights.hf_config import config_from_hf, vision_config
from k3_jax.weights.names import MXFP4, Parameter, text_parameters, vision_parameters
from k3_jax.weights.safetensors import CheckpointError, SafetensorsFile, TensorInfo, unique_pairs

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_pairs)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return data


def is_released(directory: str | os.PathLike) -> bool:
    """Whether the directory holds safetensors files or their index (complete or not)."""
    path = Path(directory)
    return path.is_dir() and ((path / INDEX).is_file() or any(path.glob("*.safetensors")))


def read_config_json(directory: str | os.PathLike) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory."""
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    return _read_json(path)


def read_config(directory: str | os.PathLike) -> K3Config:
    """The configuration of a checkpoint directory in the released layout."""
    data = read_config_json(directory)
    try:
        return config_from_hf(data)
    except ConfigError as error:
        raise ConfigError(f"{Path(directory) / CONFIG}: {error}") from None


def _open_files(directory: Path) -> tuple[dict[str, SafetensorsFile], Path]:
    """The file of every tensor, and the path that lists them; index and files must agree."""
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise CheckpointError(f"{directory}: holds neither {INDEX} nor {SINGLE}")
        file = SafetensorsFile(directory / SINGLE)
        return dict.fromkeys(file.infos, file), file.path
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected an object with an entry for each tensor")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{index}: tensor {name}: file {file_name!r}: expected a file of this directory")
    for file_name, name in {file_name: name for name, file_name in weight_map.items()}.items():
        if not (directory / file_name).is_file():
            raise CheckpointError(f"{directory / file_name}: no such file; {INDEX} places tensor {name} there")
    owners: dict[str, SafetensorsFile] = {}
    for file_name in sorted(set(weight_map.values())):
        file = SafetensorsFile(directory / file_name)
        for name in file.infos:
            if name in owners:
                raise CheckpointError(f"{file.path}: tensor {name}: is also in {owners[name].path.name}")
            if name not in weight_map:
                raise CheckpointError(f"{file.path}: tensor {name}: is not listed in {INDEX}")
            owners[name] = file
    for name, file_name in weight_map.items():
        if name not in owners or owners[name].path.name != file_name:
            raise CheckpointError(f"{directory / file_name}: tensor {name}: missing; {INDEX} places it there")
    return owners, index


class ReleasedCheckpoint:
    """An opened and checked checkpoint; parameters are read one at a time, experts also in part.

    Args:
        config: decides which tensors are expected; `read_config(directory)` unless the caller has another source.
    Raises:
        CheckpointError: naming tensor and file, if the set of tensors, a shape, a dtype or a file is not as expected.
    """

    def __init__(self, directory: str | os.PathLike, config: K3Config):
        self.directory = Path(directory)
        self.files, self._listing = _open_files(self.directory)
        self.parameters = {parameter.name: parameter for parameter in text_parameters(config)}
        self.vision: list[Parameter] = self._vision_parameters()
        self._check_tensors()

    def _vision_parameters(self) -> list[Parameter]:
        if not (self.directory / CONFIG).is_file():
            return []
        vision = vision_config(read_config_json(self.directory))
        if vision is None:
            return []
        tower, projector = vision_parameters(vision)
        parameters = tower + projector
        # A text-only cut of a checkpoint may keep the full config.json.
        return parameters if any(parameter.stored in self.files for parameter in parameters) else []

    def is_packed(self, base: str) -> bool:
        """Whether the expert matrix of this released name is MXFP4; plain bfloat16 only if that is what is stored."""
        return f"{base}.weight" not in self.files or f"{base}.weight_packed" in self.files

    def _expected(self, parameter: Parameter) -> Iterator[tuple[str, TensorInfo]]:
        if parameter.row.dtype != MXFP4:
            yield from parameter.infos()
            return
        for index in range(parameter.experts):
            base = parameter.expert(index)
            if self.is_packed(base):
                yield from parameter.packed_infos(index).items()
            else:
                yield f"{base}.weight", TensorInfo("BF16", parameter.stored_shape)

    def _check_tensors(self) -> None:
        unexpected = set(self.files)
        for parameter in [*self.parameters.values(), *self.vision]:
            for name, info in self._expected(parameter):
                self._check_tensor(name, info, parameter)
                unexpected.discard(name)
        if unexpected:
            name = min(unexpected)
            raise CheckpointError(f"{self.files[name].path}: tensor {name}: not a tensor of this model")

    def _check_tensor(self, name: str, expected: TensorInfo, parameter: Parameter) -> None:
        if name not in self.files:
            raise CheckpointError(f"{self._listing}: tensor {name}: missing")
        file = self.files[name]
        info = file.infos[name]
        if info.dtype != expected.dtype:
            raise CheckpointError(f"{file.path}: tensor {name}: dtype {info.dtype}: expected {expected.dtype}")
        # A_log is stored with a tail of zeros whose length is a matter of alignment: `read` checks that it is zero.
        padded = parameter.is_padded and len(info.shape) == 1 and info.shape[0] >= parameter.shape[0]
        if info.shape != expected.shape and not padded:
            shape = f"shape {list(info.shape)}: expected {list(expected.shape)}"
            raise CheckpointError(f"{file.path}: tensor {name}: {shape}")

    def read_stored(self, name: str) -> np.ndarray:
        """A tensor by its released name, as it is: a read-only view of the file."""
        return self.files[name].read(name)

    def read(self, name: str, expert_dtype=ml_dtypes.bfloat16) -> np.ndarray:
        """A parameter by its canonical name, in memory's axis order; experts are stacked [E, in, out]."""
        parameter = self.parameters[name]
        if parameter.experts:
            return self.read_experts(name, 0, parameter.experts, expert_dtype)
        stored = self.read_stored(parameter.stored)
        if parameter.is_padded and np.any(stored[parameter.shape[0] :] != 0):
            path, live = self.files[parameter.stored].path, parameter.shape[0]
            raise CheckpointError(f"{path}: tensor {parameter.stored}: expected zeros after its {live} heads")
        return np.array(parameter.to_memory(stored), order="C")

    def read_experts(self, name: str, start: int, stop: int, dtype=ml_dtypes.bfloat16) -> np.ndarray:
        """Experts start..stop-1 of `layers.L.moe.w1|w2|w3`, decoded: [stop - start, in, out]."""
        parameter = self.parameters[name]
        out = np.empty((stop - start, *parameter.shape[1:]), dtype)
        for index in range(start, stop):
            out[index - start] = parameter.to_memory(self._expert(parameter.expert(index), dtype))
        return out

    def _expert(self, base: str, dtype) -> np.ndarray:
        if not self.is_packed(base):
            return self.read_stored(f"{base}.weight")
        scale = f"{base}.weight_scale"
        try:
            return mxfp4_decode(self.read_stored(f"{base}.weight_packed"), self.read_stored(scale), dtype)
        except ValueError as error:
            raise CheckpointError(f"{self.files[scale].path}: tensor {scale}: {error}") from None

    def read_packed(
        self, name: str, start: int, stop: int
    ) -> tuple[UInt8[np.ndarray, "E out half_in"], UInt8[np.ndarray, "E out groups"]]:
        """The same experts undecoded, as stored; CheckpointError if one of them is not packed."""
        parameter = self.parameters[name]
        packed, scale = [], []
        for index in range(start, stop):
            base = parameter.expert(index)
            if not self.is_packed(base):
                raise CheckpointError(f"{self.files[base + '.weight'].path}: tensor {base}.weight: expected MXFP4")
            packed.append(self.read_stored(f"{base}.weight_packed"))
            scale.append(self.read_stored(f"{base}.weight_scale"))
        return np.stack(packed), np.stack(scale)
