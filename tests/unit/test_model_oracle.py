"""The whole model against the slow oracle, over configurations of the family; the oracle against the golden files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import extend, from_named, load_golden, logits_of, make_model, random_tokens, tiny_config, to_named
from tests.unit.oracle import Oracle, assert_logits, expected_logits

CONFIGS = {
    "base": tiny_config(),
    "one_kda_layer": tiny_config(num_layers=1, mla_layers=(), attn_res_block=12),
    "heads_and_conv_width": tiny_config(
        num_layers=3,
        mla_layers=(1,),
        attn_res_block=1,
        kda={"num_heads": 3, "head_dim": 4, "conv_width": 2},
        mla={"num_heads": 1, "v_head_dim": 5, "qk_rope_head_dim": 3},
    ),
    "all_dense": tiny_config(num_layers=6, mla_layers=(1, 3, 5), first_dense_layers=6, moe=None, attn_res_block=2),
    "unbounded_gate_top_1": tiny_config(num_layers=3, kda={"gate_lower_bound": None}, moe={"top_k": 1}),
    "mla_first_moe_everywhere": tiny_config(num_layers=3, mla_layers=(0,), first_dense_layers=0, attn_res_block=5),
    "nine_layers": tiny_config(
        num_layers=9,
        mla_layers=(3, 7, 8),
        attn_res_block=4,
        first_dense_layers=2,
        moe={"top_k": 3, "renormalize": False, "routed_scaling_factor": 2.5},
    ),
    "other_constants": tiny_config(
        num_layers=2,
        mla_layers=(1,),
        norm_eps=1e-2,
        situ_beta=1.5,
        situ_linear_beta=3.0,
        attn_res_block=3,
        kda={"gate_lower_bound": -2.0},
        mla={"latent_norm_eps": 0.1},
        moe={"top_k": 5},
    ),
}
# Rows: one document; two documents and padding behind them; padding on the left and between two documents.
SEGMENTS = np.array([[0] * 19, [4] * 9 + [5] * 6 + [-1] * 4, [-1] * 3 + [0] * 8 + [-1] * 2 + [1] * 6])


def test_oracle_reproduces_the_released_model():
    model, named, expected = load_golden("k3_tiny_c")
    oracle = Oracle(named, model.config)
    logits = oracle.run(expected["input_ids"][0])
    assert np.abs(logits - expected["logits"][0]).max() <= 1e-4
    for layer, r in enumerate(oracle.sums):
        assert np.abs(r - expected[f"layer{layer}"][0]).max() <= 2e-4


def random_case(config, seed=0):
    model = make_model(config, seed)
    return model, Oracle(to_named(model, config), config), random_tokens(config, len(SEGMENTS), SEGMENTS.shape[1], seed)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "nine_layers" else ()) for name in CONFIGS]
)
def test_configurations(name):
    model, oracle, tokens = random_case(CONFIGS[name])
    actual = logits_of(model, tokens, jnp.asarray(SEGMENTS, jnp.int32))
    assert_logits(actual, expected_logits(oracle, tokens, SEGMENTS), SEGMENTS)


@pytest.mark.slow
@pytest.mark.slow
def test_93_layers():
    """K3's own layer lists and AttnRes blocks: all rows of the bank live to the end.

    So many random layers amplify rounding; sublayers with small outputs keep that below 1e-3.
    """
    mla_layers = (*range(3, 92, 4), 92)
    config = tiny_config(num_layers=93, mla_layers=mla_layers, attn_res_block=12, first_dense_layers=93, moe=None)
    named = to_named(make_model(config), config)
    small = {name: 0.1 for name in named if name.endswith((".kda.o", ".mla.o", ".dense.down"))}
    named = {name: (x * small.get(name, 1)).astype(np.float32) for name, x in named.items()}
    tokens, ids = random_tokens(config, 2, 9), np.array([[0] * 9, [0] * 5 + [1] * 3 + [-1]])
    actual = logits_of(from_named(named, config), tokens, jnp.asarray(ids, jnp.int32))
    assert_logits(actual, expected_logits(Oracle(named, config), tokens, ids), ids, 5e-3)


@pytest.mark.parametrize(
    "name", ["heads_and_conv_width", pytest.param("mla_first_moe_everywhere", marks=pytest.mark.slow)]
)
def test_cached_chunks_of_rows_of_different_lengths(name):
    """Chunks of at most 5 tokens, filled differently in each row, then single tokens."""
    model, oracle, tokens = random_case(CONFIGS[name], seed=1)
    tokens, expected = tokens[:2], expected_logits(oracle, tokens[:2], np.zeros((2, 19), int))
    cache, at = model.init_cache(2, 24, jnp.float32), np.array([0, 0])
    for counts in ((5, 3), (1, 5), (4, 0), (1, 1), (1, 0), (0, 1)):
        width = 5 if max(counts) > 1 else 1
        live = np.arange(width)[None] < np.array(counts)[:, None]
        position = np.minimum(at[:, None] + np.arange(width)[None], 18)
        chunk = np.where(live, np.take_along_axis(np.asarray(tokens), position, 1), 7).astype(np.int32)
        before = cache
        logits, cache = extend(model, jnp.asarray(chunk), jnp.asarray(np.where(live, 0, -1), jnp.int32), cache)
        wanted = np.take_along_axis(expected, position[..., None], 1)
        assert_logits(logits, wanted, np.where(live, 0, -1))
        at = at + np.array(counts)
        np.testing.assert_array_equal(cache.lengths, at)
        for row in np.flatnonzero(np.array(counts) == 0):
            for a, b in zip(jax.tree.leaves(before.layers), jax.tree.leaves(cache.layers), strict=True):
                np.testing.assert_array_equal(a[:, :, row], b[:, :, row])
