"""N-gram baselines against direct counting, and their value on the default corpus."""

import itertools

import numpy as np
import pytest

from k3_jax.config import ConfigError, DataConfig
from k3_jax.train import ngram
from k3_jax.train.corpus import Corpus, make_corpus
from k3_jax.train.data import iter_eval_batches


def make(documents: list[list[int]]) -> Corpus:
    tokens = np.concatenate([np.asarray(d, np.int32) for d in documents])
    bounds = np.cumsum([0, *map(len, documents)])
    return Corpus(tokens, bounds, np.ones(len(tokens), bool), tuple(map(str, range(len(documents)))))


@pytest.fixture(scope="module")
def small() -> Corpus:
    rng = np.random.default_rng(1)
    return make([rng.choice(3, size=rng.integers(1, 30), p=[0.6, 0.3, 0.1]).tolist() for _ in range(12)])


def slow(documents: list[list[int]], vocab: int, context: tuple[int, ...], token: int) -> float:
    """Witten-Bell by scanning the documents."""
    if context:
        lower = slow(documents, vocab, context[1:], token)
    else:
        lower = 1 / vocab
    n = len(context)
    after = [d[i] for d in documents for i in range(n, len(d)) if tuple(d[i - n : i]) == context]
    if not after:
        return lower
    return (after.count(token) + len(set(after)) * lower) / (len(after) + len(set(after)))


def test_probabilities_match_direct_counting_and_sum_to_one(small):
    documents = [piece.tolist() for piece in np.split(small.tokens, small.bounds[1:-1])]
    model = ngram.fit(small, vocab_size=4)  # token 3 never occurs
    for context in itertools.product(range(4), repeat=3):
        for age in (3, 1, 0):
            found = np.zeros((4, 4))
            for token in range(4):
                tokens, ages = np.array([*context, token]), np.array([0, 0, 0, age])
                found[:, token] = model.probabilities(tokens, ages, np.array([3]))[:, 0]
                expected = [slow(documents, 4, context[3 - min(n, age) :], token) for n in range(4)]
                np.testing.assert_allclose(found[:, token], expected, rtol=1e-12)
            np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)


def test_score_uses_exactly_the_targets_and_contexts_of_the_batches(small):
    documents = [piece.tolist() for piece in np.split(small.tokens, small.bounds[1:-1])]
    data = DataConfig(sequence_length=7, batch_size=4)
    scores = ngram.nats_per_token(ngram.fit(small, 3), iter_eval_batches(small, data))
    losses: list[list[float]] = []
    for batch in iter_eval_batches(small, data):
        for row, t in zip(*np.nonzero(batch.loss_mask), strict=True):
            segment = batch.segment_ids[row]
            seen = [int(batch.tokens[row, i]) for i in range(t + 1) if segment[i] == segment[t]]
            target = int(batch.tokens[row, t + 1])
            losses.append([-np.log(slow(documents, 3, tuple(seen[-n:]), target)) for n in (1, 2, 3)])
    expected = np.mean(losses, axis=0)
    np.testing.assert_allclose([scores["bigram"], scores["trigram"], scores["4-gram"]], expected, rtol=1e-10)
    assert len(losses) == sum(len(d) - 1 for d in documents)


def test_a_cycle_is_learnt_and_noise_is_not():
    data = DataConfig(sequence_length=65, batch_size=4)
    cycle = make([[0, 1, 2, 3] * 500])
    assert ngram.nats_per_token(ngram.fit(cycle, 256), iter_eval_batches(cycle, data))["bigram"] < 0.02
    noise = [make([np.random.default_rng(seed).integers(0, 16, 100_000).tolist()]) for seed in (0, 1)]
    score = ngram.nats_per_token(ngram.fit(noise[0], 256), iter_eval_batches(noise[1], data))
    assert np.log(16) <= score["bigram"] < np.log(16) + 0.01


def test_default_corpus():
    data = DataConfig(sequence_length=512, batch_size=16)
    model = ngram.fit(make_corpus(data, "train"), 256)
    scores = ngram.nats_per_token(model, iter_eval_batches(make_corpus(data, "held_out"), data))
    assert list(scores) == ["bigram", "trigram", "4-gram"]
    assert 2.3 < scores["bigram"] < 2.7 and 1.7 < scores["trigram"] < 2.1 and 1.4 < scores["4-gram"] < 1.7


def test_large_vocabulary_is_refused(small):
    with pytest.raises(ConfigError, match="vocab_size = 163840: expected at most 55107 for n-grams of 4 tokens"):
        ngram.fit(small, 163840)
    ngram.fit(small, 163840, max_order=3)


def test_no_targets(small):
    with pytest.raises(ValueError, match="no target"):
        ngram.nats_per_token(ngram.fit(small, 3), [])
