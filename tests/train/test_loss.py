"""The chunked loss against the formula on whole rows of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.train.loss import next_token_loss
from tests.models import make_model, random_tokens, tiny_config

CONFIG = tiny_config(num_layers=1, mla_layers=(0,), first_dense_layers=1, moe=None)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk", [1, 5, 13, 64])
def test_loss_and_gradient(chunk, z_loss):
    model, tokens, rng = make_model(CONFIG), random_tokens(CONFIG, 2, 13), np.random.default_rng(0)
    h = jnp.asarray(3 * rng.normal(size=(2, 13, CONFIG.hidden_size)), jnp.float32)
    mask = (rng.random((2, 13)) < 0.7) & (np.arange(13) < 12)[None]

    def obvious(h):
        logits = model.logits(h)[:, :-1]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
        z = jax.nn.logsumexp(logits, -1)
        return jnp.sum((z_loss * z**2 - log_p)[mask[:, :-1]])

    (total, count), pullback = jax.vjp(lambda h: next_token_loss(model, h, tokens, jnp.asarray(mask), chunk, z_loss), h)
    assert count == mask.sum()
    np.testing.assert_allclose(total, obvious(h), rtol=1e-5)
    gradient = pullback((jnp.ones(()), np.zeros((), jax.dtypes.float0)))[0]
    np.testing.assert_allclose(gradient, jax.grad(obvious)(h), rtol=1e-4, atol=1e-5)
