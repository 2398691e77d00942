"""A directory of packed weights: what `k3 pack` leaves, and loading it onto the ranks of a mesh.

manifest.json      the model and how it was cut; of each section the array, the bytes and each rank's sha256
tape-000.bin ...   one file per array and rank, as the kernel holds it, little-endian without a header
packing.jsonl      instead of the manifest while packing is not finished (`packing.py`)
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3_jax.config import ConfigError, K3Config
from k3_jax.overrides import from_json, to_json
from k3_jax.serve.pack import blocks_for, decode_config
from k3_jax.serve.sources import digest
from pallas_kernels.decode import AXIS, LAYOUT_VERSION, Plan, nbytes, round_up

MANIFEST, JOURNAL = "manifest.json", "packing.jsonl"
# Tokens in all rows together from which reading a whole cache, 24 MB per core, costs more than two exchanges.
CUT_ABOVE = 21_000
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


@dataclass(frozen=True)
class Cut:
    """All that decides what stands in the files, but for the weights themselves."""

    model: K3Config
    ranks: int
    dtype: str

    def plan(self, rows: int = 1, capacity: int = 1) -> Plan:
        """For so many rows of at least `capacity` tokens; the cache is cut over the ranks where that is faster. Raises
        ConfigError if the kernel cannot be built."""
        blocks, cache_ranks = blocks_for(self.model, self.ranks), self.ranks if rows * capacity > CUT_ABOVE else 1
        tokens = round_up(capacity, blocks.cache_rows * cache_ranks)
        config = decode_config(
            self.model, ranks=self.ranks, rows=rows, capacity=tokens, cache_ranks=cache_ranks, blocks=blocks,
            dtype=DTYPES[self.dtype],
        )  # fmt: skip
        return Plan(config)

    @cached_property
    def header(self) -> dict[str, Any]:
        """The JSON of it, with the layout's version and a hash of all."""
        blocks = blocks_for(self.model, self.ranks)
        data = {
            "layout_version": LAYOUT_VERSION,
            "model": to_json(self.model),
            "ranks": self.ranks,
            "dtype": self.dtype,
            "tile": [blocks.tile_rows, blocks.tile_cols],
        }
        return data | {"config_hash": digest(data)}


def file_name(array: str, rank: int) -> str:
    return f"{array}-{rank:03}.bin"


@dataclass(frozen=True)
class Packed:
    """A finished directory, its manifest read and checked against the files' sizes."""

    directory: Path
    cut: Cut
    sections: list[dict[str, Any]]

    @staticmethod
    def open(directory: Path) -> "Packed":
        """Raises ConfigError unless it is whole and of this version of the layout."""
        path, data = directory / MANIFEST, read_manifest(directory)
        try:
            if data["layout_version"] != LAYOUT_VERSION:
                found = f"{path}: layout_version = {data['layout_version']!r}"
                raise ConfigError(f"{found}: expected {LAYOUT_VERSION}; pack the checkpoint again")
            cut = Cut(from_json(K3Config, data["model"]), data["ranks"], data["dtype"])
            packed = Packed(directory, cut, data["sections"])
            if data["config_hash"] != cut.header["config_hash"]:
                raise ConfigError(f"{path}: config_hash does not belong to what it describes: the file was changed")
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}: damaged ({error}); pack the checkpoint again") from None
        packed._check_files()
        return packed

    def _check_files(self) -> None:
        for name, array in self.cut.plan().weights.items():
            expected = nbytes(array)
            for rank in range(self.cut.ranks):
                path = self.directory / file_name(name, rank)
                found = path.stat().st_size if path.is_file() else None
                if found != expected:
                    raise ConfigError(f"{path}: {found} bytes: expected {expected}; pack the checkpoint again")

    def verified(self, array: str, rank: int) -> Iterator[tuple[slice, np.ndarray]]:
        """A rank's bytes of one array, section by section. Raises ConfigError at one that is not what was packed."""
        path = self.directory / file_name(array, rank)
        data = np.memmap(path, np.uint8, "r")
        for section in self.sections:
            if section["array"] == array:
                part = slice(section["begin"], section["end"])
                if hashlib.sha256(data[part]).hexdigest() != section["sha256"][rank]:
                    remedy = "the file was changed or damaged; pack the checkpoint again"
                    raise ConfigError(f"{path}: {section['name']}: wrong checksum: {remedy}")
                yield part, data[part]

    def read(self, name: str, rank: int, like: jax.ShapeDtypeStruct) -> np.ndarray:
        """A rank's array in memory, verified."""
        out, end = np.empty(nbytes(like), np.uint8), 0
        for part, data in self.verified(name, rank):
            out[part] = data
            end += len(data)
        if end != len(out):
            raise ConfigError(f"{self.directory / MANIFEST}: sections of {name} hold {end} bytes: expected {len(out)}")
        return out.view(like.dtype).reshape(like.shape)

    def load(self, plan: Plan, mesh: Mesh) -> dict[str, jax.Array]:
        """Every rank's weights [ranks, ...] on its device; only this process's ranks are read, one array at a time."""
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        return {name: self._place(name, array, sharding) for name, array in plan.weights.items()}

    def _place(self, name: str, array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array:
        devices = sharding.mesh.devices.reshape(-1)
        mine = [(rank, device) for rank, device in enumerate(devices) if device.process_index == jax.process_index()]
        parts = [jax.device_put(self.read(name, rank, array)[None], device) for rank, device in mine]
        return jax.make_array_from_single_device_arrays((len(devices), *array.shape), sharding, parts)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Its JSON. Raises ConfigError if packing was not finished there, or the file is damaged."""
    path = directory / MANIFEST
    if not path.is_file():
        unfinished = (directory / JOURNAL).is_file()
        remedy = "packing is unfinished: run k3 pack again" if unfinished else "expected a directory of k3 pack"
        raise ConfigError(f"{directory}: has no {MANIFEST}: {remedy}")
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: damaged ({error}); pack the checkpoint again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: damaged; pack the checkpoint again")
    return data


def manifest(cut: Cut, source: str, sections: list[Mapping[str, Any]]) -> dict[str, Any]:
    return cut.header | {"source": source, "sections": sections}
