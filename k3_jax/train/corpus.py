"""Documents, their tokens and the train / held-out split.

`DataConfig.source` is `"stdlib"` (the Python files of the running interpreter's standard library: a corpus that every
machine already has), a file, or a folder. Text files of any ending are one document each, `.jsonl` and `.parquet` rows
are one each. Without an encoder tokens are bytes. Hidden files are not read; unreadable and binary files are listed in
`Corpus.skipped`.

Split: a document is held out when sha256(its name) mod 20 is 0; the name is its POSIX path relative to the source, plus
`:row` for rows. A corpus so small that this holds out nothing (or everything) holds out the document with the smallest
hash instead, and a corpus of one document its last twentieth.

Chat (`DataConfig.chat`): a row is `{"messages": [{"role": ..., "content": ...}, ...]}`. It is rendered as
`STX role newline content end` for each message, where STX is byte 2 and the end is byte 3 (ETX), or the tokenizer's end
token where it has one; only the assistant's content and its end are trained on. The released chat format is richer.
"""

import functools
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer

from k3_jax.config import ConfigError, DataConfig

Encode = Callable[[str], Sequence[int]]

SPLITS = ("train", "held_out")
HELD_OUT_MODULUS = 20
ROLES = ("system", "user", "assistant", "tool")
STX, ETX = "\x02", "\x03"
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "__pycache__"}
_FOLDER_EXCLUDED = {"__pycache__"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of one split: document d is `tokens[bounds[d]:bounds[d + 1]]`, never empty.

    `trained[i]` says whether token i may be a target (all of them, except in chat data).
    """

    tokens: Integer[np.ndarray, "N"]
    bounds: Integer[np.ndarray, "bounds"]
    trained: Bool[np.ndarray, "N"]
    names: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes whenever a token, a document end or a target does; every host and every restart must agree on it."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.bounds, np.packbits(self.trained)):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises ConfigError when a token has no embedding: an out-of-range gather would be silent on a device."""
        top = int(self.tokens.max())
        if top >= vocab_size:
            raise ConfigError(f"model.vocab_size = {vocab_size}: expected more than {top}, the largest token read")


def make_corpus(data: DataConfig, split: str, encode: Encode | None = None, eos_token_id: int | None = None) -> Corpus:
    """Reads one split of `data.source`. `encode=None` means bytes; `eos_token_id` ends each document unless None."""
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: expected one of {SPLITS}")
    documents, skipped = _read(data)
    if not documents:
        wanted = "rows with `messages` in .jsonl or .parquet files" if data.chat else "at least one non-empty text"
        note = f" (skipped {len(skipped)} files, such as {skipped[0]!r})" if skipped else ""
        raise ConfigError(f"DataConfig.source = {data.source!r}: expected {wanted}{note}")
    held_out = _held_out([name for name, _ in documents])
    if len(documents) > 1:
        documents = [d for d, held in zip(documents, held_out, strict=True) if held == (split == "held_out")]
    pieces = [(name, *_tokenize(content, encode, eos_token_id)) for name, content in documents]
    if len(held_out) == 1:
        name, tokens, trained = pieces[0]
        cut = len(tokens) - len(tokens) // HELD_OUT_MODULUS
        keep = slice(cut) if split == "train" else slice(cut, None)
        pieces = [(name, tokens[keep], trained[keep])]
    return _join(data, split, [piece for piece in pieces if len(piece[1])], tuple(skipped))


def _join(
    data: DataConfig, split: str, pieces: list[tuple[str, np.ndarray, np.ndarray]], skipped: tuple[str, ...]
) -> Corpus:
    total = sum(len(tokens) for _, tokens, _ in pieces)
    if total < 2:
        raise ConfigError(f"DataConfig.source = {data.source!r}: expected at least 2 tokens in the {split} split")
    names, tokens, trained = zip(*pieces, strict=True)
    if not any(flags.any() for flags in trained):
        raise ConfigError(f"DataConfig.source = {data.source!r}: expected an assistant message in the {split} split")
    bounds = np.cumsum([0, *map(len, tokens)])
    return Corpus(np.concatenate(tokens), bounds, np.concatenate(trained), names, skipped)


# Split


def _digest(name: str) -> int:
    return int(hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest(), 16)


def _held_out(names: list[str]) -> list[bool]:
    digests = [_digest(name) for name in names]
    held = [digest % HELD_OUT_MODULUS == 0 for digest in digests]
    if all(held) or not any(held):
        held = [digest == min(digests) for digest in digests]
    return held


# Tokens


def _tokenize(content: Any, encode: Encode | None, eos: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and target flags of one document: bytes of a file, a string, or a list of chat messages."""
    if isinstance(content, list):
        return render_chat(content, encode, eos)
    tokens = _encode(content, encode)
    if eos is not None:
        tokens = np.append(tokens.astype(np.int32), np.int32(eos))
    return tokens, np.ones(len(tokens), bool)


def _encode(content: bytes | str, encode: Encode | None) -> np.ndarray:
    if encode is None:
        return np.frombuffer(content if isinstance(content, bytes) else content.encode("utf-8", "replace"), np.uint8)
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    return np.asarray(encode(text), np.int32)


def render_chat(
    messages: list[dict[str, str]], encode: Encode | None = None, eos_token_id: int | None = None
) -> tuple[Integer[np.ndarray, "N"], Bool[np.ndarray, "N"]]:
    """Tokens of a conversation and the flags of those to train on; the format is in the module's docstring."""
    end = _encode(ETX, encode) if eos_token_id is None else np.array([eos_token_id], np.int32)
    tokens, trained = [], []
    for message in messages:
        # A marker inside a message would let its author write another turn.
        content = message["content"].replace(STX, "").replace(ETX, "")
        header, body = _encode(f"{STX}{message['role']}\n", encode), _encode(content, encode)
        tokens += [header, body, end]
        trained += [np.zeros(len(header), bool), np.full(len(body) + len(end), message["role"] == "assistant")]
    return np.concatenate(tokens), np.concatenate(trained)


# Files


def _read(data: DataConfig) -> tuple[list[tuple[str, Any]], list[str]]:
    """(name, content) of every non-empty document in the order of relative paths, and the names of skipped files."""
    documents, skipped = [], []
    root, paths = _files(data.source)
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        if path.suffix in (".jsonl", ".parquet"):
            rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path, data)
            documents += [(f"{name}:{number}", _row_content(row, f"{path}:{number}", data)) for number, row in rows]
            continue
        raw = None if data.chat else _read_text(path)
        if raw is None:
            skipped.append(name)
        else:
            documents.append((name, raw))
    return [(name, content) for name, content in documents if content], skipped


def _files(source: str) -> tuple[Path, list[Path]]:
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return root, [path for path in _walk(root, _STDLIB_EXCLUDED) if path.suffix == ".py"]
    root = Path(source).expanduser()
    if root.is_file():
        return root.parent, [root]
    if root.is_dir():
        return root, list(_walk(root, _FOLDER_EXCLUDED))
    raise ConfigError(f"DataConfig.source = {source!r}: expected 'stdlib' or an existing file or folder")


def _walk(root: Path, excluded: set[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded and not name.startswith(".")]
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _read_text(path: Path) -> bytes | None:
    """None for what cannot be read and for binary files (which hold a zero byte)."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    return None if b"\0" in raw else raw


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"DataConfig.source = {str(path)!r}: expected a readable file ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} = {line[:60]!r}: expected a JSON object ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number} = {line[:60]!r}: expected a JSON object")
        yield number, row


def _parquet_rows(path: Path, data: DataConfig) -> Iterator[tuple[int, dict]]:
    try:
        import pyarrow  # here, because it is an optional dependency
        from pyarrow import parquet
    except ImportError as error:
        remedy = "expected pyarrow to read Parquet: pip install pyarrow"
        raise ConfigError(f"DataConfig.source = {str(path)!r}: {remedy}") from error
    try:
        file = parquet.ParquetFile(path)
        wanted = [name for name in (_field(data),) if name in file.schema_arrow.names]
        number = 0
        for batch in file.iter_batches(columns=wanted or None):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"DataConfig.source = {str(path)!r}: expected a Parquet file ({error})") from error


# Rows


def _field(data: DataConfig) -> str:
    return "messages" if data.chat else data.text_field


def _row_content(row: dict, where: str, data: DataConfig) -> str | list[dict[str, str]]:
    field = _field(data)
    label = "DataConfig.chat = True" if data.chat else f"DataConfig.text_field = {field!r}"
    if field not in row:
        raise ConfigError(f"{label}: expected the field {field!r} at {where}, which has {', '.join(row) or 'none'}")
    content = row[field]
    if data.chat:
        return [_message(message, where) for message in _expect(content, list, field, where)]
    return _expect(content, str, field, where)


def _message(message: Any, where: str) -> dict[str, str]:
    _expect(message, dict, "message", where)
    if message.get("role") not in ROLES:
        raise ConfigError(f"role = {message.get('role')!r} at {where}: expected one of {', '.join(ROLES)}")
    return {"role": message["role"], "content": _expect(message.get("content"), str, "content", where)}


def _expect(value: Any, kind: type, field: str, where: str) -> Any:
    if not isinstance(value, kind):
        names = {str: "a string", list: "a list of messages", dict: "an object with role and content"}
        raise ConfigError(f"{field} = {value!r:.60} at {where}: expected {names[kind]}")
    return value
