"""The reference step in float32 is the model's own cached decoding, token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode import Plan, Slots, independent, reference
from tests.decode.model import kernel_config, model_config, weights
from tests.decode.steps import random_caches
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


SLOTS = Slots(*map(jnp.array, ((3, -1, -1, -1, 2), (0, 1, 4, 2, 3), (3, 3, 3, 3, 2))))
POSITION = (14, 15, -1, 16, 40)
SEQUENCES = {3: (0, 1, 3), 2: (4,)}  # slot it starts from: rows


def test_rows_of_one_sequence_are_steps_of_one_row():
    """In both mixers, which alone know of other tokens: three tokens from slot 3, an idle row among them, that leave
    states in slots 0, 1 and 2 and latents in slot 3; and a row from slot 2 that leaves its state in slot 3."""
    config = model_config(layers=4)
    kernel, arrays = kernel_config(config, rows=5), jax.tree.map(jnp.asarray, weights(config))
    start = random_caches(Plan(kernel))
    x = jnp.asarray(np.random.default_rng(2).normal(size=(5, kernel.hidden)), jnp.float32)

    def mixers(x, caches, position, slots):
        run, outputs = reference._Step(arrays, kernel, lambda x: x, jnp.array(position), slots), []
        for mixer, layer in ((run.kda, 1), (run.mla, 3)):
            output, caches = mixer(reference._Layer(arrays, layer), x, caches, layer)
            outputs.append(output)
        return jnp.stack(outputs), caches

    have, caches = mixers(x, start, POSITION, SLOTS)
    want, number = jax.tree.map(np.array, start), kernel.kda_layers.index(1)
    for slot, rows in SEQUENCES.items():
        one = jax.tree.map(lambda x, slot=slot: x[:, slot : slot + 1], start)
        for row in rows:
            output, one = mixers(x[row : row + 1], one, POSITION[row : row + 1], independent(1))
            np.testing.assert_allclose(have[:, row], output[:, 0], atol=2e-5)
            for name in ("S", "conv"):
                getattr(want, name)[number, SLOTS.exit[row]] = getattr(one, name)[number, 0]
        want.latent[:, slot] = one.latent[:, 0]
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), caches, want)


@pytest.mark.slow
def test_rounding_is_that_of_bfloat16():
    """Without the rounding points logits move by more than the kernel's tolerance, so they matter."""
    config = model_config()
    named, kernel = weights(config), kernel_config(config)
    at = (reference.empty_caches(kernel), jnp.array([3, 77]), jnp.array([0, 0]), independent(2))
    run = lambda dtype: reference.step(jax.tree.map(jnp.asarray, named), *at, config=kernel, dtype=dtype)[0]  # noqa: E731
    difference = np.abs(np.asarray(run(jnp.bfloat16) - run(jnp.float32))).max()
    assert 1e-3 < difference < 0.5
