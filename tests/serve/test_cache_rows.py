"""Rows of a cache are values: copied, forked and replaced whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import ConfigError
from k3_jax.serve import cache_rows
from k3_jax.serve.decode import decode
from k3_jax.serve.prefill import prefill
from k3_jax.serve.sampling import SamplingConfig
from tests.serve.compare import assert_close, assert_same


@pytest.fixture(scope="module")
def filled(model, tokens):
    return prefill(
        model, tokens[:, :20], model.init_cache(2, 256, jnp.float32), lengths=[12, 20], chunk=16, dtype=jnp.float32
    )


def test_select_insert_and_copy(filled, new_cache):
    cache = filled.cache
    swapped = cache_rows.select(cache, [1, 0])
    assert swapped.lengths.tolist() == [20, 12]
    assert_same(cache_rows.select(swapped, [1, 0]), cache)
    larger = cache_rows.insert(new_cache(4), [3, 1], cache)
    assert larger.lengths.tolist() == [0, 20, 0, 12]
    assert_same(cache_rows.select(larger, [3, 1]), cache)
    assert_same(cache_rows.select(larger, [0, 2]), new_cache(2))
    assert_same(cache_rows.copy(larger, 1, 2), cache_rows.insert(larger, [2], cache_rows.select(cache, [1])))


def test_reset_empties_only_the_named_rows(filled, new_cache):
    cache = cache_rows.reset(filled.cache, jnp.asarray([True, False]))
    assert_same(cache_rows.select(cache, [0]), new_cache(1))
    assert_same(cache_rows.select(cache, [1]), cache_rows.select(filled.cache, [1]))


def test_forks_go_separate_ways_and_leave_the_origin(model, tokens, filled):
    """Two rows fork from one; each samples its own tokens, the origin's bytes stay, both equal cold runs."""
    before = jax.tree.map(np.array, filled.cache)
    sampling = [SamplingConfig(1.0, seed=seed) for seed in (1, 2)]
    forked = cache_rows.fork(filled.cache, 1, 2)
    logits = jnp.repeat(filled.logits[1:], 2, axis=0)
    options = {"max_tokens": 6, "dtype": jnp.float32}
    together = np.stack(list(decode(model, logits, forked, sampling=sampling, steps=4, **options)), axis=1)
    assert_same(filled.cache, before)
    assert len({tuple(row) for row in together.tolist()}) == 2
    for row, config in enumerate(sampling):
        origin = cache_rows.select(filled.cache, [1])
        alone = decode(model, filled.logits[1:], origin, sampling=config, steps=3, **options)
        assert together[row].tolist() == [int(x[0]) for x in alone]


def test_truncate_some_rows_only(model, tokens, new_cache):
    whole = prefill(model, tokens[:, :40], new_cache(2), chunk=16, boundaries=[20], dtype=jnp.float32)
    back = cache_rows.truncate(whole.cache, whole.boundaries[20])
    mixed = cache_rows.insert(whole.cache, [1], cache_rows.select(back, [1]))
    assert mixed.lengths.tolist() == [40, 20]
    again = prefill(model, tokens[:, 20:40], mixed, lengths=[0, 20], chunk=16, dtype=jnp.float32)
    assert_close(again.cache, whole.cache)


@pytest.mark.parametrize(
    ("rows", "capacity", "message"),
    [([0], 512, "inserted capacity = 512: expected 256"), ([0, 1], 256, "rows = 2: expected 1")],
)
def test_insert_errors(new_cache, rows, capacity, message):
    with pytest.raises(ConfigError, match=message):
        cache_rows.insert(new_cache(2), rows, new_cache(1, capacity))


def test_capacity(model, new_cache):
    assert cache_rows.capacity(new_cache(1, 77)) == 77
    with pytest.raises(ConfigError, match="cache row 1 = 78 tokens: expected at most the cache's capacity of 77"):
        cache_rows.check_capacity(new_cache(2, 77), [77, 78])
