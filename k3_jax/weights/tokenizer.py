"""Tokenizers: the released byte-level BPE vocabulary, and plain bytes for small models.

`tiktoken.model` holds one line per ordinary token, its bytes in base64 and its rank, which is its id and its merge
priority (there is no list of merges, and one cannot be derived without loss). 256 special tokens follow the ranks.
"""

import base64
import binascii
import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import tiktoken

from k3_jax.config import ConfigError

BYTES = "bytes"  # the name of the byte tokenizer in a data configuration
FILE_NAME = "tiktoken.model"
MAX_BYTE_VOCAB = 512
MAX_CHARS = 400_000  # per call of the encoder
MAX_RUN = 25_000  # characters of one kind, space or not: the cost of BPE grows faster than the length of a run

NUM_SPECIAL = 256
# Offsets from the first id after the ranks; the others print as <|reserved_token_ID|>.
_SPECIAL = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}


def _pattern() -> str:
    """The pre-tokenizer: alternatives in order, the first match wins. Han runs are never part of a word."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lead, contraction = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    alternatives = (
        r"\p{Han}+",
        lead + upper + "*" + lower + "+" + contraction,
        lead + upper + "+" + lower + "*" + contraction,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    return "|".join(alternatives)


def slices(text: str, max_chars: int = MAX_CHARS, max_run: int = MAX_RUN) -> Iterator[str]:
    """Cuts a text into pieces of at most `max_chars` that hold no run of (non-)space longer than `max_run`."""
    for start in range(0, len(text), max_chars):
        piece, begin = text[start : start + max_chars], 0
        for run in re.finditer(r"\s+|\S+", piece):
            for cut in range(run.start() + max_run, run.end(), max_run):
                yield piece[begin:cut]
                begin = cut
        yield piece[begin:]


@runtime_checkable
class AnyTokenizer(Protocol):
    """What the rest of the project uses of a tokenizer."""

    vocab_size: int

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes: ...

    def decode(self, ids: Iterable[int]) -> str: ...


def _read_ranks(path: Path) -> dict[bytes, int]:
    # Not tiktoken's own loader: it caches by path and would serve yesterday's file.
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"tokenizer = {path}: cannot be read ({error.strerror})") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(f"tokenizer = {path}: line {number}: expected a base64 token and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
        raise ConfigError(f"tokenizer = {path}: expected ranks 0..n-1, each once, among them all 256 single bytes")
    return ranks


class Tokenizer:
    """The released vocabulary: `special` maps names to ids, `vocab_size` counts ranks and specials."""

    def __init__(self, path: str | os.PathLike):
        ranks = _read_ranks(Path(path))
        first = len(ranks)
        names = (_SPECIAL.get(i, f"<|reserved_token_{first + i}|>") for i in range(NUM_SPECIAL))
        self.special = {name: first + i for i, name in enumerate(names)}
        self.vocab_size = first + NUM_SPECIAL
        self._encoding = tiktoken.Encoding(
            Path(path).name, pat_str=_pattern(), mergeable_ranks=ranks, special_tokens=self.special
        )

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of a text. Special tokens in it are ordinary text unless `allow_special`: only markup may have them."""
        encode = self._encoding.encode_ordinary
        if allow_special:
            return [i for piece in slices(text) for i in self._encoding.encode(piece, allowed_special="all")]
        return [i for piece in slices(text) for i in encode(piece)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of the ids, specials by their names; ConfigError for an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        _check_ids(ids, self.vocab_size)
        return self._encoding.decode_bytes(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 (a character cut short) become U+FFFD. See StreamDecoder."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8 text; there are no special tokens.

    The end of a text is the model's `eos_token_id`, whatever byte or id that is: a model with 256 ids or fewer gives
    one byte value up for it (a tiny test model with 128 ids ends at 126, "~"). Ids from 256 on stand for no byte and
    decode to their <|reserved_token_ID|> names.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The bytes of a text; ConfigError that names the first byte outside the vocabulary. No specials exist."""
        try:
            data = text.encode("utf-8", "surrogateescape")  # a command line's bytes that are no UTF-8 stay themselves
        except UnicodeEncodeError:  # pairs of surrogates become characters, single ones U+FFFD; as tiktoken does
            data = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode("utf-8")
        if self.vocab_size < 256 and data and max(data) >= self.vocab_size:
            position, byte = next((i, b) for i, b in enumerate(data) if b >= self.vocab_size)
            raise ConfigError(
                f"text: byte {byte} (0x{byte:02x}) at position {position}: expected bytes below vocab_size = "
                f"{self.vocab_size}"
            )
        return list(data)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        ids = [int(i) for i in ids]
        _check_ids(ids, self.vocab_size)
        return b"".join(bytes([i]) if i < 256 else f"<|reserved_token_{i}|>".encode() for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ConfigError(f"token id = {i}: expected 0..{vocab_size - 1}")


class StreamDecoder:
    """Text of ids that arrive one by one: `push` returns what is complete, a character only once it is whole."""

    def __init__(self, tokenizer: AnyTokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, *ids: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """The rest: U+FFFD where the last character was cut short."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(path: str | os.PathLike | None, vocab_size: int) -> Tokenizer | ByteTokenizer:
    """The tokenizer of a model with `vocab_size` ids.

    Args:
        path: a `tiktoken.model`, or a directory that may hold one; None or "bytes" for none.
    Raises:
        ConfigError: no file and a vocabulary above 512, a named file that does not exist, or more ids than the model.
    """
    file = None if path is None or path == BYTES else Path(path)
    if file is not None and file.is_dir():
        file = file / FILE_NAME if (file / FILE_NAME).is_file() else None
    if file is None:
        if vocab_size > MAX_BYTE_VOCAB:
            raise ConfigError(
                f"vocab_size = {vocab_size}: without a tokenizer file the text is taken as bytes, which needs at most "
                f"{MAX_BYTE_VOCAB}; put the model's {FILE_NAME} beside its weights or name it as the tokenizer, or "
                "give token ids instead of text"
            )
        return ByteTokenizer(vocab_size)
    if not file.is_file():
        raise ConfigError(f"tokenizer = {file}: no such file")
    tokenizer = Tokenizer(file)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(f"tokenizer = {file}: {tokenizer.vocab_size} ids: expected at most vocab_size = {vocab_size}")
    return tokenizer
