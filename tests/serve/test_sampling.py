"""Sampling against NumPy, and its independence of everything but seed and position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import ConfigError
from k3_jax.serve.sampling import NOT_FINITE, Sampler, SamplingConfig, kept, sample

V = 12
LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2


def numpy_kept(logits, top_k, top_p):
    """One row, by the definition: sort, cut to k, add up until top_p is reached."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k or None]
    p = np.exp(logits[order] - logits[order].max())
    p, keep, total = p / p.sum(), set(), 0.0
    for token, probability in zip(order, p, strict=True):
        if total >= top_p and top_p < 1 and keep:
            break
        keep.add(token)
        total += probability
    return keep


@pytest.mark.parametrize("top_k", [0, 1, 3, 12, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
def test_masks_against_numpy(top_k, top_p):
    logits = np.random.default_rng(top_k).normal(size=(20, V)).astype(np.float32) * 2
    keep = kept(jnp.asarray(logits), jnp.full(20, top_k), jnp.full(20, top_p, jnp.float32))
    for row, mask in zip(logits, np.asarray(keep), strict=True):
        assert set(np.flatnonzero(mask)) == numpy_kept(row, top_k, top_p)


def test_equal_logits_keep_exactly_k():
    keep = kept(jnp.zeros((1, V)), jnp.asarray([5]), jnp.ones(1))
    assert np.flatnonzero(np.asarray(keep)[0]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("config", [SamplingConfig(1.0), SamplingConfig(0.5, top_k=4), SamplingConfig(1.5, top_p=0.7)])
def test_frequencies(config):
    N = 20000
    draw = jax.jit(lambda position: sample(jnp.tile(jnp.asarray(LOGITS), (N, 1)), position, Sampler.of([config] * N)))
    counts = np.bincount(np.asarray(draw(jnp.arange(N))), minlength=V) / N
    tempered = LOGITS / config.temperature
    p = np.zeros(V)
    keep = sorted(numpy_kept(tempered, config.top_k, config.top_p))
    p[keep] = np.exp(tempered[keep] - tempered.max())
    p /= p.sum()
    assert np.all(counts[p == 0] == 0)
    assert np.abs(counts - p).max() < 5 * np.sqrt(0.25 / N)


def test_a_row_does_not_depend_on_its_batch():
    configs = [SamplingConfig(), SamplingConfig(1.0, seed=7), SamplingConfig(0.7, top_k=5, seed=7), SamplingConfig(2.0)]
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(4, V)), jnp.float32)
    position = jnp.asarray([3, 5, 5, 9])
    together = sample(logits, position, Sampler.of(configs))
    for row, config in enumerate(configs):
        alone = sample(logits[row : row + 1], position[row : row + 1], Sampler.of([config]))
        assert together[row] == alone[0]


def test_greedy_takes_the_first_largest_and_ignores_the_seed():
    logits = jnp.zeros((2, V)).at[:, 4].set(1.0).at[:, 6].set(1.0)
    tokens = sample(logits, jnp.zeros(2, int), Sampler.of([SamplingConfig(seed=1), SamplingConfig(seed=2)]))
    assert tokens.tolist() == [4, 4]


def test_nan_is_not_token_zero():
    logits = jnp.zeros((2, V)).at[1, 3].set(jnp.nan)
    for temperature in (0.0, 1.0):
        tokens = sample(logits, jnp.zeros(2, int), Sampler.of([SamplingConfig(temperature)] * 2))
        assert tokens[0] >= 0 and tokens[1] == NOT_FINITE


@pytest.mark.parametrize(
    "field", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5},
              {"top_p": float("nan")}, {"seed": -1}, {"seed": 2**32}]
)  # fmt: skip
def test_bad_values(field):
    with pytest.raises(ConfigError, match=next(iter(field))):
        SamplingConfig(**field)
