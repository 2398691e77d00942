"""`k3 score`: the logits of given tokens, float32 [B, T, vocab], in a .npy file.

Rows go through the model in groups and their logits to the file in pieces, in order: memory stays bounded however
large the file becomes. The file appears under its name only when it is whole.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from k3_jax.config import ConfigError, K3Config
from k3_jax.serve.inputs import add_model_arguments, check_vocabulary, compute_dtype, read_tokens

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from k3_jax.nn.transformer import K3

TOKENS_PER_CALL = 16384
VALUES_PER_PIECE = 1 << 25  # logits in memory at once
PROGRESS_SECONDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--tokens", required=True, type=Path, metavar="FILE", help=".npy of token ids [B, T]")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="where to write the logits, .npy float32 [B, T, vocab]"
    )


def run(args: argparse.Namespace) -> int:
    tokens = read_tokens(args.tokens, "--tokens")
    if tokens.ndim != 2:
        raise ConfigError(f"--tokens = {args.tokens}: shape {tokens.shape}: expected [B, T]")
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise ConfigError(f"--out = {args.out}: expected a file in a folder that exists")
    if args.out.exists() and not args.out.is_file():
        raise ConfigError(f"--out = {args.out}: expected a regular file or a new name")
    args.out = args.out.resolve()  # a link stays, what it points to is replaced
    from k3_jax.nn.pretrained import load_config, load_model

    _check_tokens(tokens, load_config(args.checkpoint))
    model = load_model(args.checkpoint)
    temporary = args.out.with_name(f".{args.out.name}.{os.getpid()}.tmp")
    try:
        with _create(temporary, args.out) as file:
            _write(file, model, tokens, compute_dtype(args.dtype))
        os.replace(temporary, args.out)
    finally:
        temporary.unlink(missing_ok=True)
    return 0


def _check_tokens(tokens: np.ndarray, config: K3Config) -> None:
    check_vocabulary(tokens, config, "--tokens")
    if tokens.shape[1] > config.max_positions:
        limit = config.max_positions
        raise ConfigError(f"--tokens = {tokens.shape[1]} tokens in a row: expected at most max_positions = {limit}")


def _create(temporary: Path, out: Path) -> BinaryIO:
    try:
        return temporary.open("wb")
    except OSError as error:
        raise ConfigError(f"--out = {out}: cannot be written ({error.strerror})") from None


def _write(file: BinaryIO, model: "K3", tokens: np.ndarray, dtype: "DTypeLike") -> None:
    shape = (*tokens.shape, model.config.vocab_size)
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    done, told = 0, time.monotonic()
    for logits in logit_pieces(model, tokens, dtype):
        file.write(np.ascontiguousarray(logits, "<f4").data)
        done += len(logits)
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            print(f"k3 score: {done:,} of {tokens.size:,} tokens", file=sys.stderr, flush=True)


def logit_pieces(model: "K3", tokens: np.ndarray, dtype: "DTypeLike") -> Iterator[np.ndarray]:
    """Logits [n, vocab] of successive tokens, row after row."""
    import jax
    import jax.numpy as jnp

    B, T = tokens.shape
    group = min(B, max(1, TOKENS_PER_CALL // T))
    width = min(T, max(1, VALUES_PER_PIECE // model.config.vocab_size))
    hidden = jax.jit(lambda model, tokens: model.hidden(tokens, dtype=dtype)[0])
    # The last piece of a row starts early, so that all have one shape.
    cut = lambda h, row, start: jax.lax.dynamic_slice(h, (row, start, 0), (1, width, h.shape[2]))  # noqa: E731
    logits = jax.jit(lambda model, h, row, start: model.logits(cut(h, row, start))[0])
    for first in range(0, B, group):
        rows = tokens[first : first + group]
        padded = np.concatenate([rows, np.zeros((group - len(rows), T), np.int32)])
        h = hidden(model, jnp.asarray(padded))
        for row in range(len(rows)):
            for start in range(0, T, width):
                early = min(start, T - width)
                yield np.asarray(logits(model, h, row, early))[start - early :]
