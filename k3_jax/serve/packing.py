"""Packing a checkpoint into a directory (`packed.py`), section by section, so that memory holds one section's tensors.

A journal, packing.jsonl, has the header, then a line for each section that is on the disk, with all ranks' checksums.
A run that was stopped goes on after the last whole line; the manifest appears, by a rename, when no section is left.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from k3_jax.config import ConfigError
from k3_jax.overrides import differences
from k3_jax.serve.packed import JOURNAL, MANIFEST, Cut, Packed, file_name, manifest, read_manifest
from k3_jax.serve.sources import Checkpoint
from k3_jax.serve.widen import Widened
from pallas_kernels.decode import Packer, PackError, Plan, Section, Tensors, nbytes, sections_of

Report = Callable[[str, int, int], None]  # (section, bytes done, bytes in all)


def pack_checkpoint(checkpoint: Checkpoint, cut: Cut, directory: Path, report: Report) -> Packed:
    """Packs, or goes on with what an interrupted run left; a finished directory stays as it is.

    Raises:
        ConfigError: the directory holds something else, the disk is too small, another process is packing there, or
            the checkpoint has values that the kernel's storage cannot hold.
        OSError: the disk is full; what is done stays done.
    """
    plan, source = cut.plan(), checkpoint.fingerprint
    if (directory / MANIFEST).is_file():
        _check_same(directory / MANIFEST, read_manifest(directory), cut, source)
        return Packed.open(directory)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: is a file: expected a new or empty directory")
    if directory.exists() and not (directory / JOURNAL).is_file() and any(directory.iterdir()):
        raise ConfigError(f"{directory}: holds other files: expected a new or empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / JOURNAL, "a+") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{directory}: another k3 pack is writing there") from None
        done = _resume(journal, cut, source)
        writer = _Writer(plan, directory, journal, done)
        writer.write(checkpoint, Widened(checkpoint, cut.model, cut.ranks), report)
        _write_atomically(directory / MANIFEST, manifest(cut, source, list(done.values())))
        (directory / JOURNAL).unlink()
    return Packed.open(directory)


def _check_same(path: Path, found: dict[str, Any], cut: Cut, source: str) -> None:
    """Raises ConfigError if the directory is of another configuration or checkpoint."""
    remedy = "choose another directory, or remove this one"
    if found.get("config_hash") != cut.header["config_hash"]:
        keys = [key for key in cut.header if key != "config_hash"]
        lines = differences({key: found.get(key) for key in keys}, {key: cut.header[key] for key in keys})
        raise ConfigError(f"{path}: packed for another configuration ({'; '.join(lines[:3])}): {remedy}")
    if found.get("source") != source:
        raise ConfigError(f"{path}: packed from another checkpoint, or from this one before it changed: {remedy}")


def _resume(journal: TextIO, cut: Cut, source: str) -> dict[str, dict[str, Any]]:
    """The sections that are done, by name; the journal then ends with its last whole line."""
    journal.seek(0)
    text = journal.read()
    lines = text[: text.rfind("\n") + 1].splitlines()
    journal.truncate(len("".join(f"{line}\n" for line in lines).encode()))
    journal.seek(0, os.SEEK_END)
    if not lines:
        _append(journal, cut.header | {"source": source})
        return {}
    path = Path(journal.name)
    try:
        header, *entries = (json.loads(line) for line in lines)
        done = {entry["name"]: entry for entry in entries}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: damaged: remove {path.parent} and pack again") from None
    _check_same(path, header, cut, source)
    return done


def _append(journal: TextIO, entry: dict[str, Any]) -> None:
    journal.write(json.dumps(entry) + "\n")
    journal.flush()
    os.fsync(journal.fileno())


class _Writer:
    """`done` gets an entry for each section that is on the disk."""

    def __init__(self, plan: Plan, directory: Path, journal: TextIO, done: dict[str, dict[str, Any]]):
        self.plan, self.directory, self.journal, self.done = plan, directory, journal, done
        self.packers = [Packer(plan, rank) for rank in range(plan.config.ranks)]

    def write(self, checkpoint: Checkpoint, tensors: Tensors, report: Report) -> None:
        """`tensors` are those of the checkpoint, as the kernel wants them."""
        every = list(sections_of(self.plan))
        size = sum(map(self._size, every))
        written = sum(self._size(section) for section in every if section.name in self.done)
        self._make_files()
        self._check_room(size - written)
        for section in every:
            if section.name not in self.done:
                try:
                    self._write(section, tensors)
                except PackError as error:
                    raise ConfigError(f"{section.name}: {error}") from None
                written += self._size(section)
                report(section.name, written, size)
                checkpoint.forget()

    def _size(self, section: Section) -> int:
        return len(self.packers) * (section.end - section.begin)

    def _make_files(self) -> None:
        """Of their final size, without blocks. Later, one that is not there was lost."""
        for name, array in self.plan.weights.items():
            for rank in range(len(self.packers)):
                path = self.directory / file_name(name, rank)
                if self.done and not path.is_file():
                    raise ConfigError(f"{path}: lost since packing began: remove {self.directory} and pack again")
                with open(path, "ab") as file:
                    file.truncate(nbytes(array))

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            gib = f"{needed / 2**30:.1f} GiB are still to be written, {free / 2**30:.1f} GiB are free"
            raise ConfigError(f"{self.directory}: {gib}: expected a larger disk")

    def _write(self, section: Section, tensors: Tensors) -> None:
        hashes = []
        for rank, packer in enumerate(self.packers):
            data = np.ascontiguousarray(section.make(packer, tensors)).reshape(-1).view(np.uint8)
            if len(data) != section.end - section.begin:
                raise AssertionError(f"{section.name}: {len(data)} bytes made for {section.begin}:{section.end}")
            _write_at(self.directory / file_name(section.array, rank), section.begin, data)
            hashes.append(hashlib.sha256(data).hexdigest())
        place = {"array": section.array, "begin": section.begin, "end": section.end}
        entry = {"name": section.name} | place | {"sha256": hashes}
        _append(self.journal, entry)
        self.done[section.name] = entry


def _write_at(path: Path, begin: int, data: np.ndarray) -> None:
    with open(path, "r+b") as file:
        file.seek(begin)
        file.write(data.data)
        file.flush()
        os.fsync(file.fileno())


def _write_atomically(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
