"""Chunked prefill: chunks, padding, mixed lengths, boundaries and old contents of rows change nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import ConfigError
from k3_jax.serve import cache_rows
from k3_jax.serve import prefill as prefill_module
from k3_jax.serve.prefill import compact, prefill
from tests.serve.compare import assert_close, assert_same


def run(model, tokens, cache, **kwargs):
    return prefill(model, np.asarray(tokens), cache, dtype=jnp.float32, **({"chunk": 16} | kwargs))


@pytest.fixture(scope="module")
def one_shot(model, tokens):
    return run(model, tokens, model.init_cache(2, 256, jnp.float32), chunk=1000)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_equal_one_shot(model, tokens, new_cache, one_shot, chunk):
    chunked = run(model, tokens, new_cache(2), chunk=chunk)
    assert_close(chunked.logits, one_shot.logits)
    assert_close(chunked.cache, one_shot.cache)


def test_one_shot_equals_the_training_forward(model, tokens, one_shot):
    logits = jax.jit(lambda model, tokens: model(tokens, None, jnp.float32))(model, tokens)
    assert_close(one_shot.logits, logits[:, -1])


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_lengths_around_the_chunk(model, tokens, new_cache, length):
    """A continuation is not a new prompt: the first token still counts after the chunk is full."""
    changed = tokens.copy()
    changed[:, 0] = (changed[:, 0] + 1) % model.config.vocab_size
    one, other = (run(model, x[:, :length], new_cache(2)) for x in (tokens, changed))
    whole = run(model, tokens[:, :length], new_cache(2), chunk=1000)
    assert_close(one.logits, whole.logits)
    assert not np.allclose(one.logits, other.logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("place", ["left", "right", "scattered"])
def test_padding_anywhere_changes_nothing(model, tokens, new_cache, place):
    T, rng = 21, np.random.default_rng(0)
    mask = np.zeros((2, 40), bool)
    for row in mask:
        row[{"left": np.arange(19, 40), "right": np.arange(T), "scattered": rng.permutation(40)[:T]}[place]] = True
    padded = rng.integers(0, model.config.vocab_size, mask.shape)
    padded[mask] = tokens[:, :T].reshape(-1)
    expected = run(model, tokens[:, :T], new_cache(2))
    actual = run(model, padded, new_cache(2), mask=mask)
    assert_same((actual.logits, actual.cache), (expected.logits, expected.cache))


def test_mixed_lengths_equal_each_row_alone(model, tokens, new_cache):
    batch = run(model, tokens[:, :40], new_cache(2), lengths=[1, 37])
    for row, lengths in enumerate(([1, 0], [0, 37])):
        alone = run(model, tokens[:, :40], new_cache(2), lengths=lengths)
        assert_close(batch.logits[row], alone.logits[row])
        assert_close(cache_rows.select(batch.cache, [row]), cache_rows.select(alone.cache, [row]))


def test_a_row_without_tokens_is_untouched(model, tokens, new_cache):
    before = run(model, tokens[:, :20], new_cache(2)).cache
    kept = cache_rows.select(before, [0])
    after = run(model, tokens[:, :33], before, lengths=[0, 33])
    assert_same(cache_rows.select(after.cache, [0]), kept)
    assert not np.any(after.logits[0]) and np.any(after.logits[1])


def test_going_on_equals_one_call(model, tokens, new_cache):
    """Rows that stand at different lengths go on together; at a multiple of the chunk even bit for bit."""
    expected = run(model, tokens[:, :64], new_cache(2))
    first = run(model, tokens[:, :48], new_cache(2), lengths=[32, 48])
    rest = np.zeros((2, 32), np.int32)
    rest[0], rest[1, :16] = tokens[0, 32:64], tokens[1, 48:64]
    second = run(model, rest, first.cache, lengths=[32, 16])
    assert_close(second.logits, expected.logits)
    assert_close(second.cache, expected.cache)
    halves = run(model, tokens[:, 32:64], run(model, tokens[:, :32], new_cache(2)).cache)
    assert_same((halves.logits, halves.cache), (expected.logits, expected.cache))


@pytest.mark.parametrize("boundaries", [16, [5, 16, 23, 36, 37]])
def test_boundaries_are_bit_equal_to_stopping_there(model, tokens, new_cache, boundaries):
    lengths = np.asarray([37, 26])
    whole = run(model, tokens[:, :37], new_cache(2), lengths=lengths, boundaries=boundaries)
    plain = run(model, tokens[:, :37], new_cache(2), lengths=lengths)
    assert_same((whole.logits, whole.cache), (plain.logits, plain.cache))
    assert list(whole.boundaries) == ([16, 32] if boundaries == 16 else boundaries)
    for at, boundary in whole.boundaries.items():
        stopped = run(model, tokens[:, :37], new_cache(2), lengths=np.minimum(lengths, at))
        assert_same(cache_rows.truncate(whole.cache, boundary), stopped.cache)


@pytest.mark.parametrize("at", [16, 23])
def test_a_warm_start_equals_a_cold_one(model, tokens, new_cache, at):
    """Another prompt that shares the first tokens goes on from the boundary; the donor's cache stays usable."""
    donor = run(model, tokens[:, :37], new_cache(2), boundaries=[at])
    other = np.concatenate([tokens[:, :at], tokens[:, 50:70]], axis=1)
    cold = run(model, other, new_cache(2))
    warm = run(model, other[:, at:], cache_rows.truncate(donor.cache, donor.boundaries[at]))
    if at % 16 == 0:
        assert_same((warm.logits, warm.cache), (cold.logits, cold.cache))
    assert_close((warm.logits, warm.cache), (cold.logits, cold.cache))
    going_on = run(model, tokens[:, 37:48], donor.cache)
    assert_close(going_on.logits, run(model, tokens[:, :48], new_cache(2)).logits)


def test_two_prompts_one_after_the_other_share_nothing(model, tokens, new_cache):
    used = run(model, tokens[:, :50], new_cache(2)).cache
    again = run(model, tokens[:, 60:80], cache_rows.reset(used, jnp.asarray([True, True])))
    fresh = run(model, tokens[:, 60:80], new_cache(2))
    assert_same((again.logits, again.cache), (fresh.logits, fresh.cache))


@pytest.mark.parametrize("length", [1, 20])
def test_nan_of_an_old_owner_does_not_leak(model, tokens, new_cache, length):
    """A first chunk of one token is a prefill, and an idle row full of NaN harms nobody."""
    poisoned = replace(new_cache(2), layers=jax.tree.map(lambda x: x * jnp.nan, new_cache(2).layers))
    one = run(model, tokens[:, :length], poisoned, lengths=[0, length])
    fresh = run(model, tokens[:, :length], new_cache(2), lengths=[0, length])
    assert_close(one.logits, fresh.logits)
    assert_close(cache_rows.select(one.cache, [1]), cache_rows.select(fresh.cache, [1]))
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(cache_rows.select(one.cache, [0]).layers))


def test_all_chunks_and_continuations_run_one_program(model, tokens, new_cache):
    run(model, tokens[:, :5], new_cache(2))
    before = prefill_module._step._cache_size()
    cache = run(model, tokens[:, :50], new_cache(2), boundaries=[7]).cache
    run(model, tokens[:, 50:60], cache)
    assert prefill_module._step._cache_size() == before


def test_compact_keeps_the_order():
    tokens, counts = compact(np.asarray([[9, 1, 9, 2], [3, 9, 9, 9]]), np.asarray([[0, 1, 0, 1], [1, 0, 0, 0]]), None)
    assert tokens.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]] and counts.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros((2, 257), int)}, "row 0 = 257 tokens: expected at most the cache's capacity of 256"),
        ({"tokens": np.full((2, 3), 50)}, r"tokens\[0, 0\] = 50: expected 0..49"),
        ({"tokens": np.zeros((3, 4), int)}, "tokens = 3 rows: expected 2"),
        ({"tokens": np.zeros(4, int)}, r"expected integers \[B, T\]"),
        ({"tokens": np.zeros((2, 4))}, "tokens = float64"),
        ({"lengths": [1, 5]}, r"lengths = \[1, 5\]: expected 0..4"),
        ({"lengths": [1, 2], "mask": np.ones((2, 4))}, "at most one of them"),
        ({"mask": np.ones((2, 3))}, r"mask.shape = \(2, 3\): expected \(2, 4\)"),
        ({"boundaries": [5]}, "boundaries = 5: expected lengths in 1..4"),
        ({"boundaries": 0}, "boundaries = 0"),
        ({"chunk": 0}, "chunk = 0"),
    ],
)
def test_errors_name_the_value(model, new_cache, change, message):
    arguments = {"tokens": np.zeros((2, 4), int)} | change
    with pytest.raises(ConfigError, match=message):
        run(model, cache=new_cache(2), **arguments)


def test_more_tokens_than_positions(model, new_cache):
    with pytest.raises(ConfigError, match="row 0 = 401 tokens: expected at most max_positions = 400"):
        run(model, np.zeros((1, 401), int), new_cache(1, 512))
