"""The tensors of a checkpoint, one at a time, for packing: those that a section needs are kept until the next one."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from k3_jax.config import ConfigError, K3Config
from k3_jax.dtypes import mxfp4_codes
from k3_jax.serve.pack import expert_codes
from k3_jax.weights.names import text_parameters
from k3_jax.weights.orbax import MODEL, find_step, read_array, saved_dtypes
from k3_jax.weights.reader import ReleasedCheckpoint, is_released
from pallas_kernels.decode import ExpertCodes, Tensors


class Checkpoint(Tensors):
    """What was read is kept for the other ranks until `forget`."""

    def __init__(self, names: frozenset[str], files: set[Path]):
        self.names, self._files = names, sorted(files)
        self._kept: dict[object, object] = {}

    @abstractmethod
    def _read(self, name: str) -> np.ndarray: ...

    @abstractmethod
    def _codes(self, name: str, start: int, stop: int) -> ExpertCodes: ...

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise KeyError(name)
        return self._keep(name, lambda: self._read(name))

    def codes(self, name: str, start: int, stop: int) -> ExpertCodes:
        return self._keep((name, start, stop), lambda: self._codes(name, start, stop))

    def _keep(self, key, read):
        if key not in self._kept:
            self._kept[key] = read()
        return self._kept[key]

    def forget(self) -> None:
        self._kept.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def fingerprint(self) -> str:
        """Of the files' names, sizes and times: another checkpoint, or a changed one, has another."""
        stats = [(path.name, path.stat()) for path in self._files]
        return digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])


class Released(Checkpoint):
    """The released layout; packed experts are taken as they are stored."""

    def __init__(self, directory: Path, config: K3Config):
        self._checkpoint = ReleasedCheckpoint(directory, config)
        files = {file.path for file in self._checkpoint.files.values()}
        super().__init__(frozenset(self._checkpoint.parameters), files)

    def _read(self, name: str) -> np.ndarray:
        return self._checkpoint.read(name)

    def _codes(self, name: str, start: int, stop: int) -> ExpertCodes:
        parameter = self._checkpoint.parameters[name]
        if not all(self._checkpoint.is_packed(parameter.expert(i)) for i in range(start, stop)):
            return expert_codes(name, self._checkpoint.read_experts(name, start, stop, np.float32))
        packed, scales = self._checkpoint.read_packed(name, start, stop)
        return ExpertCodes(mxfp4_codes(packed), scales)


class Trained(Checkpoint):
    """A step of a training run; the largest tensor is all experts' w1, w3 or w2 of a layer."""

    def __init__(self, step: Path, config: K3Config):
        self._item = step / MODEL
        names, wanted = frozenset(saved_dtypes(self._item)), {p.name: p.shape for p in text_parameters(config)}
        if names != wanted.keys():
            missing, extra = sorted(wanted.keys() - names), sorted(names - wanted.keys())
            raise ConfigError(f"checkpoint {step}: missing {missing[:3]}, unexpected {extra[:3]}")
        super().__init__(names, {path for path in self._item.rglob("*") if path.is_file()})
        self._stack: tuple[int, dict[str, np.ndarray]] = (-1, {})

    def _read(self, name: str) -> np.ndarray:
        return read_array(self._item, name)

    def _codes(self, name: str, start: int, stop: int) -> ExpertCodes:
        layer = int(name.split(".")[1])
        if self._stack[0] != layer:
            self._stack = (layer, {})
        stacks = self._stack[1]
        if name not in stacks:
            stacks[name] = self._read(name)
        return expert_codes(name, stacks[name][start:stop])


def open_checkpoint(directory: Path, config: K3Config) -> Checkpoint:
    """Raises ConfigError if it is neither kind, or incomplete."""
    if is_released(directory):
        return Released(directory, config)
    step = find_step(directory)
    if step is None:
        raise ConfigError(f"checkpoint {directory}: neither an Orbax checkpoint nor a folder with config.json")
    return Trained(step, config)


def digest(data: object) -> str:
    """sha256 of what is JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
