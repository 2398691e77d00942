"""Choices of experts to plan for: made up, or those of a router, from a file."""

from pathlib import Path

import numpy as np

from k3_jax.config import ConfigError

Choices = np.ndarray  # int32 [R, S, k]: experts that the tokens of each rank chose
PATTERNS = {
    "uniform": "any experts",
    "zipf": "the i-th expert i times less popular than the first",
    "one-expert": "expert 0 in every token's choice",
    "one-rank": "experts of the fewest ranks that have enough",
}


def made_up(pattern: str, ranks: int, tokens: int, experts: int, top_k: int, seed: int = 0) -> Choices:
    """k different experts per token, by Gumbel's trick: the k largest of log popularity plus noise."""
    log_popularity = np.zeros(experts, np.float32)
    match pattern:
        case "zipf":
            log_popularity -= np.log(1 + np.arange(experts, dtype=np.float32))
        case "one-expert":
            log_popularity[0] = np.inf
        case "one-rank":
            home = experts // ranks
            log_popularity[home * -(-top_k // home) :] = -np.inf
    choices = np.empty((ranks, tokens, top_k), np.int32)
    for rank in range(ranks):
        noise = np.random.default_rng((seed, rank)).random((tokens, experts), np.float32)
        score = log_popularity - np.log(-np.log(noise.clip(1e-12, 1 - 1e-7)))
        choices[rank] = np.argpartition(-score, top_k - 1, axis=1)[:, :top_k]
    return choices


def from_file(path: Path, ranks: int, tokens: int, experts: int, top_k: int) -> Choices:
    """A NumPy file of ranks x tokens x k experts, in any shape that ends in k. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            choices = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise ConfigError(f"--routing = {path}: {error.strerror}: expected a file, or {', '.join(PATTERNS)}") from None
    except ValueError:
        raise ConfigError(f"--routing = {path}: expected a .npy file of integers") from None
    wanted = (ranks * tokens, top_k)
    if choices.dtype.kind not in "iu" or choices.size != wanted[0] * top_k or choices.shape[-1:] != wanted[1:]:
        raise ConfigError(
            f"--routing = {path}: holds {choices.dtype} {list(choices.shape)}: expected integers [{ranks * tokens}, "
            f"{top_k}], the experts of {ranks} x {tokens} tokens"
        )
    if choices.min() < 0 or choices.max() >= experts:
        raise ConfigError(
            f"--routing = {path}: holds experts {choices.min()} to {choices.max()}: expected 0 to {experts - 1}"
        )
    choices = choices.reshape(ranks, tokens, top_k).astype(np.int32)
    if (np.diff(np.sort(choices, axis=-1), axis=-1) == 0).any():
        raise ConfigError(f"--routing = {path}: expected {top_k} different experts per token")
    return choices
