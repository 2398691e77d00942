"""Comparing caches and logits."""

import jax
import numpy as np


def assert_same(actual, expected) -> None:
    """Bit for bit, NaN equal to NaN."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(actual, expected, tolerance: float = 1e-5) -> None:
    """Relative RMS of every array."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        error = np.sqrt(np.mean((a - b) ** 2)) / max(np.sqrt(np.mean(b**2)), 1e-6)
        assert error <= tolerance, error
