"""Models and prompts that the tests of serving share. Most tests use 2 rows and chunks of 16, to compile little."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.nn.pretrained import load_model
from k3_jax.nn.transformer import K3
from tests.models import make_model, tiny_config

VOCAB = 50


@pytest.fixture(scope="session")
def model() -> K3:
    """Small, with every kind of layer, and AttnRes blocks that end in the middle of a mixer period."""
    return make_model(
        tiny_config(vocab_size=VOCAB, num_layers=5, mla_layers=(1, 3), attn_res_block=3, max_positions=400)
    )


@pytest.fixture(scope="session")
def tiny_c(golden) -> K3:
    return load_model(golden / "k3_tiny_c")


@pytest.fixture(scope="session")
def expected(golden) -> dict[str, np.ndarray]:
    return dict(np.load(golden / "k3_tiny_c" / "expected.npz"))


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB, (2, 130)).astype(np.int32)


@pytest.fixture
def new_cache(model):
    """`new_cache(rows)`: an empty float32 cache of 256 tokens."""
    return lambda rows, capacity=256: model.init_cache(rows, capacity, jnp.float32)
