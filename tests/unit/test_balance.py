"""Quantile Balancing against exact quantiles in numpy, and bit for bit against itself however the tokens are split."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3_jax.nn import balance

# The worked example: 8 tokens, 4 experts, k = 1.
EXAMPLE = np.array(
    [
        [0.50, 0.43, 0.15, 0.29],
        [0.74, 0.73, 0.60, 0.61],
        [0.23, 0.43, 0.33, 0.02],
        [0.47, 0.53, 0.27, 0.39],
        [0.45, 0.55, 0.37, 0.36],
        [0.99, 0.17, 0.04, 0.12],
        [0.25, 0.62, 0.80, 0.38],
        [0.65, 0.35, 0.22, 0.55],
    ],
    np.float32,
)

histogram = jax.jit(balance.histogram, static_argnums=(2, 3))
updated_bias = jax.jit(balance.updated_bias, static_argnums=2)


def skewed_scores(tokens, experts, seed=0, spread=1.5):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, experts)) + spread * rng.normal(size=experts)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def all_valid(scores):
    return jnp.ones(scores.shape[0], bool)


def loads(scores, bias, top_k):
    chosen = np.argsort(-(scores + np.asarray(bias)), axis=1, kind="stable")[:, :top_k]
    return np.bincount(chosen.reshape(-1), minlength=scores.shape[1])


def required_bias(scores, bias, top_k):
    """r_ij, sorted over the tokens: row q - 1 is the q-th smallest."""
    biased = np.sort(scores.astype(np.float64) + bias, axis=1)[:, ::-1]
    return np.sort(biased[:, top_k : top_k + 1] - scores, axis=0)


def bin_width(bias, bins):
    return (bias.max() - bias.min() + 2) / bins


def test_worked_example():
    bias = np.zeros(4, np.float32)
    assert loads(EXAMPLE, bias, 1).tolist() == [4, 3, 1, 0]
    required = required_bias(EXAMPLE, bias, 1)
    exact = required[2] - required[2].mean()  # minus the (q+1)-th largest margin, q = 2
    np.testing.assert_allclose(exact, [-0.0775, -0.0675, 0.0725, 0.0725], atol=1e-6)
    assert loads(EXAMPLE, exact, 1).tolist() == [2, 2, 2, 2]

    # The histogram's quantile is at the other end of the gap between the q-th and the (q+1)-th value.
    counts = histogram(EXAMPLE, bias, 1, 1000, all_valid(EXAMPLE))
    new = updated_bias(counts, bias, 1)
    np.testing.assert_allclose(new, required[1] - required[1].mean(), atol=2 / 1000)
    assert loads(EXAMPLE, new, 1).max() == 3


def test_quantile_within_one_bin_of_exact():
    scores, top_k, bins = skewed_scores(2048, 32), 4, 1000
    bias = np.linspace(-0.1, 0.2, 32, dtype=np.float32)
    new = np.asarray(updated_bias(histogram(scores, bias, top_k, bins, all_valid(scores)), bias, top_k), np.float64)
    exact = required_bias(scores, bias, top_k)[2048 * top_k // 32 - 1]
    assert np.abs(new - (exact - exact.mean())).max() <= bin_width(bias, bins)
    assert abs(new.mean()) < 1e-6


def test_load_converges_in_three_updates():
    scores, top_k = skewed_scores(8192, 64), 8
    bias, violations = jnp.zeros(64), []
    for _ in range(4):
        load = loads(scores, bias, top_k)
        violations.append(float(balance.load_stats(jnp.asarray(load)).max_violation))
        bias = updated_bias(histogram(scores, bias, top_k, 1000, all_valid(scores)), bias, top_k)
    assert violations[0] > 5 and violations[1] < 0.4 and violations[3] < 0.1
    assert violations == sorted(violations, reverse=True)


def test_logits_instead_of_scores_give_another_bias():
    scores, top_k = skewed_scores(512, 8), 2
    logits = np.log(scores / (1 - scores))
    bias = np.zeros(8, np.float32)
    right, wrong = (updated_bias(histogram(x, bias, top_k, 1000, all_valid(x)), bias, top_k) for x in (scores, logits))
    assert np.abs(right - wrong).max() > 0.1


def test_counts_are_those_of_numpy():
    scores, top_k, bins = skewed_scores(200, 6), 2, 37
    bias = np.array([0.3, -0.2, 0, 0.1, 0, 0], np.float32)
    valid = np.arange(200) % 3 > 0
    counts = np.asarray(histogram(scores, bias, top_k, bins, jnp.asarray(valid)))
    required = np.sort(scores + bias, axis=1)[:, [-3]] - scores
    low = bias.min() - 1
    expected = [np.histogram(required[valid, j], bins, (low, bias.max() + 1))[0] for j in range(6)]
    assert np.abs(counts - expected).sum() <= 2  # a value on a bin's edge
    assert (counts.sum(axis=1) == valid.sum()).all()


def test_extreme_scores_stay_in_range():
    """0 and 1 with the widest gap of biases: both ends of [b_min - 1, b_max + 1]."""
    scores = np.array([[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]], np.float32)
    bias = np.array([-0.7, 0.9, 0.9], np.float32)
    counts = histogram(scores, bias, 1, 10, all_valid(scores))
    assert (np.asarray(counts).sum(axis=1) == 4).all()
    assert np.isfinite(updated_bias(counts, bias, 1)).all()


def test_all_scores_equal():
    scores = np.full((64, 8), 0.5, np.float32)
    bias = updated_bias(
        histogram(scores, np.zeros(8, np.float32), 2, 100, all_valid(scores)), np.zeros(8, np.float32), 2
    )
    np.testing.assert_allclose(bias, 0, atol=1e-7)


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_add_up(parts):
    scores, bias, top_k = skewed_scores(512, 16), np.linspace(0, 0.1, 16, dtype=np.float32), 3
    whole = histogram(scores, bias, top_k, 1000, all_valid(scores))
    pieces = [histogram(x, bias, top_k, 1000, all_valid(x)) for x in np.split(scores, parts)]
    np.testing.assert_array_equal(sum(pieces), whole)


def test_counts_of_shards_add_up():
    scores, bias = skewed_scores(64, 8), jnp.zeros(8)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):

        @functools.partial(jax.shard_map, in_specs=(P("data"), P(), P("data")), out_specs=P())
        def counts(scores, bias, valid):
            return jax.lax.psum(balance.histogram(scores, bias, 2, 100, valid), "data")

        total = jax.jit(counts)(jax.device_put(scores, P("data")), bias, jax.device_put(all_valid(scores), P("data")))
    np.testing.assert_array_equal(total, histogram(scores, bias, 2, 100, all_valid(scores)))


def test_padding_counts_nowhere():
    scores, bias = skewed_scores(100, 8), np.zeros(8, np.float32)
    padded = np.concatenate([scores, np.full((28, 8), np.nan, np.float32)])
    valid = jnp.arange(128) < 100
    counts = histogram(padded, bias, 2, 100, valid)
    np.testing.assert_array_equal(counts, histogram(scores, bias, 2, 100, all_valid(scores)))
    nothing = histogram(scores, bias, 2, 100, jnp.zeros(100, bool))
    old = jnp.arange(8.0)
    np.testing.assert_array_equal(updated_bias(nothing, old, 2), old)


@pytest.mark.parametrize("bins", [7, 128, 1000])
def test_both_counts_agree(bins):
    rng = np.random.default_rng(0)
    index = jnp.asarray(rng.integers(0, bins, (700, 5)), jnp.int32)
    valid = jnp.asarray(rng.random(700) < 0.8)
    scatter, matmul = balance.count_by_scatter(index, valid, bins), balance.count_by_matmul(index, valid, bins)
    np.testing.assert_array_equal(scatter, matmul)
    np.testing.assert_array_equal(scatter[3], np.bincount(np.asarray(index)[np.asarray(valid), 3], minlength=bins))


def test_counting_is_exact_beyond_float32():
    """134 million tokens, k = 16, n = 20: m k overflows int32, and one token more or less is below float32's steps."""
    tokens, top_k, experts = 134_217_736, 16, 20
    target = -(-tokens * top_k // experts)
    counts = np.zeros((experts, 4), np.int32)
    counts[:, 0] = target
    counts[0, 0] -= 1
    counts[:, 3] = tokens - counts[:, 0]
    new = updated_bias(counts, np.zeros(experts, np.float32), top_k)
    # bins are 0.5 wide: the first expert's quantile is at the start of the fourth, the others' at the end of the first
    np.testing.assert_allclose(new[0] - new[1:], 1.0, atol=1e-6)


def test_stacked_layers():
    scores = [skewed_scores(256, 8, seed) for seed in range(3)]
    bias = jnp.stack([jnp.linspace(0, 0.1 * i, 8) for i in range(3)])
    counts = jnp.stack([histogram(s, b, 2, 50, all_valid(s)) for s, b in zip(scores, bias, strict=True)])
    stacked = updated_bias(counts, bias, 2)
    for layer in range(3):
        np.testing.assert_allclose(stacked[layer], updated_bias(counts[layer], bias[layer], 2), atol=1e-7)


def test_no_gradient_through_the_histogram():
    scores = jnp.asarray(skewed_scores(32, 4))

    def loss(scores, bias):
        counts = balance.histogram(scores, bias, 1, 10, all_valid(scores))
        return jnp.sum(scores**2) + jnp.sum(balance.updated_bias(counts, jax.lax.stop_gradient(bias), 1))

    by_scores, by_bias = jax.grad(loss, argnums=(0, 1))(scores, jnp.zeros(4))
    np.testing.assert_allclose(by_scores, 2 * scores)
    np.testing.assert_array_equal(by_bias, 0)


def test_load_stats():
    routes = jnp.array([[0, 1], [0, 2], [0, 1], [3, 3]])
    load = balance.expert_load(routes, 4, jnp.array([True, True, True, False]))
    assert load.tolist() == [3, 2, 1, 0]
    stats = balance.load_stats(load)
    assert stats.max_violation == 1.0 and stats.dead_fraction == 0.25
    empty = balance.load_stats(jnp.zeros((2, 4), jnp.int32))
    np.testing.assert_array_equal(empty.max_violation, 0)
