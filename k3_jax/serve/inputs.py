"""What users hand in: arguments that the commands share, files of tokens. No JAX at the top: arguments are parsed
without it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3_jax.config import ConfigError, K3Config


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="a training run (its newest step), one of its steps, or a directory in the released layout",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of activations and matrix products (default: float32 on a CPU, bfloat16 elsewhere)",
    )


def compute_dtype(name: str | None) -> Any:
    """The JAX dtype of `--dtype`."""
    import jax
    import jax.numpy as jnp

    return jnp.dtype(name or ("float32" if jax.default_backend() == "cpu" else "bfloat16"))


def read_tokens(path: Path, option: str) -> np.ndarray:
    """The integer array of a .npy file, as int32. Raises ConfigError that names the option and the file."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "not a .npy file of numbers, or cut short"
        raise ConfigError(f"{option} = {path}: cannot be read ({reason})") from None
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.integer):
        kind = array.dtype if isinstance(array, np.ndarray) else "an archive of several arrays"
        raise ConfigError(f"{option} = {path}: holds {kind}: expected one array of integers (.npy)")
    if array.size == 0:
        raise ConfigError(f"{option} = {path}: shape {array.shape}: expected at least one token")
    if np.any(array > np.iinfo(np.int32).max) or np.any(array < np.iinfo(np.int32).min):
        raise ConfigError(f"{option} = {path}: holds {array.max()}: expected token ids")
    return array.astype(np.int32)


def check_vocabulary(ids: Sequence[int] | np.ndarray, config: K3Config, name: str) -> None:
    """ConfigError that names the first token outside the vocabulary and its place."""
    ids = np.asarray(ids)
    wrong = np.argwhere((ids < 0) | (ids >= config.vocab_size))
    if len(wrong):
        place = tuple(int(i) for i in wrong[0])
        raise ConfigError(f"{name}{list(place)} = {ids[place]}: expected 0..{config.vocab_size - 1}")
