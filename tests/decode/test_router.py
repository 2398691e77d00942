"""The choice of experts by comparing them with each other, against `lax.top_k`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode.router import best, places

E = 896


@pytest.mark.parametrize("values", [2, 7, 1 << 20], ids=["nearly-all-equal", "many-equal", "hardly-any"])
def test_the_best_of_896(values):
    """Over the seven lane tiles of K3's experts, the lowest index first among equals."""
    rng = np.random.default_rng(values)
    scores = jnp.asarray(rng.integers(0, values, (1, E)) / values - 0.5, jnp.float32)
    p = jnp.asarray(rng.random((1, E)), jnp.float32)
    index, weight = best(16, scores, p, 16)
    expected = jax.lax.top_k(scores, 16)[1][0]
    np.testing.assert_array_equal(index[:, 0], expected)
    np.testing.assert_array_equal(weight[:, 0], p[0, expected])


@pytest.mark.parametrize("n", [128, 256])
def test_places_are_a_permutation(n):
    scores = jnp.asarray(np.random.default_rng(0).integers(0, 30, (1, n)), jnp.float32).at[0, 100:].set(-jnp.inf)
    place = places(scores, jnp.arange(float(n))[None])
    np.testing.assert_array_equal(place[0], jnp.argsort(jnp.argsort(-scores[0], stable=True)))


def test_the_best_in_one_lane():
    """Sixteen of 2,048 experts that share a lane, then one of another lane."""
    scores = jnp.zeros((1, 2048)).at[0, 5::128].set(2.0).at[0, 1000].set(1.0)
    index, _ = best(17, scores, scores, 24)
    np.testing.assert_array_equal(index[:17, 0], [*range(5, 2048, 128), 1000])


def test_rows_beyond_k_are_zero():
    index, weight = best(10, jnp.arange(128.0)[None], jnp.ones((1, 128)), 16)
    np.testing.assert_array_equal(index[:, 0], [*range(127, 117, -1), *[0] * 6])
    np.testing.assert_array_equal(weight[:, 0], [1] * 10 + [0] * 6)
