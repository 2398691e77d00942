"""The reference step in float32 is the model's own cached decoding, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode import independent, reference
from tests.decode.model import kernel_config, model_config, weights
from tests.models import extend, from_named


def test_equals_the_models_decoding():
    """Two rows, one of which is idle in the second step. Layers of every kind, over an AttnRes block's boundary."""
    config = model_config(layers=4)
    named, kernel = weights(config), kernel_config(config)
    model = from_named(named, config)
    cache, caches = model.init_cache(2, kernel.capacity, jnp.float32), reference.empty_caches(kernel)
    arrays = jax.tree.map(jnp.asarray, named)
    step = lambda *at: reference.step(arrays, *at, independent(2), config=kernel, dtype=jnp.float32)  # noqa: E731
    token, position = jnp.array([3, 77]), jnp.array([0, 0])
    for live in ([0, 0], [0, -1], [0, 0]):
        live = jnp.array(live)
        want, cache = extend(model, token[:, None], live[:, None], cache)
        have, caches = step(caches, token, jnp.where(live < 0, -1, position))
        rows = np.asarray(live) >= 0
        assert np.abs(np.asarray(have - want[:, 0])[rows]).max() < 2e-5
        token = jnp.where(live < 0, token, have.argmax(1))
        position = position + (live >= 0)


@pytest.mark.slow
def test_rounding_is_that_of_bfloat16():
    """Without the rounding points logits move by more than the kernel's tolerance, so they matter."""
    config = model_config()
    named, kernel = weights(config), kernel_config(config)
    at = (reference.empty_caches(kernel), jnp.array([3, 77]), jnp.array([0, 0]), independent(2))
    run = lambda dtype: reference.step(jax.tree.map(jnp.asarray, named), *at, config=kernel, dtype=dtype)[0]  # noqa: E731
    difference = np.abs(np.asarray(run(jnp.bfloat16) - run(jnp.float32))).max()
    assert 1e-3 < difference < 0.5
