"""Blockwise attention against the full matrix of scores, and MLA's two forms against each other."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.nn.mla import head_groups, init_cache
from pallas_kernels.attention.api import blockwise_attention
from pallas_kernels.common.testing import assert_close, assert_gradients_close, equations, outputs_and_gradients
from tests.models import make_model, tiny_config

SCALE = 0.3


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dense(q, k, v, q_position, k_position, q_segment, k_segment):
    """softmax over the whole row of scores; queries without keys give 0."""
    allowed = (q_segment[:, :, None] == k_segment[:, None]) & (q_position[:, :, None] >= k_position[:, None])
    allowed = (allowed & (q_segment >= 0)[:, :, None])[:, None, None]
    s = jnp.where(allowed, jnp.einsum("btgmk,bsgk->bgmts", q, k) * SCALE, -1e30)
    p = jnp.where(allowed, jax.nn.softmax(s, axis=-1), 0)
    return jnp.einsum("bgmts,bsgv->btgmv", p, v), jax.lax.stop_gradient(s.max((0, 3, 4)))


@functools.cache
def blockwise(block):
    return functools.partial(blockwise_attention, scale=SCALE, block=block)


def inputs(T, S, segments, seed=0):
    B, G, M, K, V = len(segments), 2, 3, 5, 4
    rows = [np.repeat(ids, counts)[:T] for ids, counts in segments]
    ids = np.stack(rows).astype(np.int32)
    arguments = {
        "q": normal(B, T, G, M, K, seed=seed), "k": normal(B, S, G, K, seed=seed + 1),
        "v": normal(B, S, G, V, seed=seed + 2),
        "q_position": np.tile(np.arange(S - T, S), (B, 1)).astype(np.int32),
        "k_position": np.tile(np.arange(S), (B, 1)).astype(np.int32),
        "q_segment": ids,
        "k_segment": ids if S == T else np.zeros((B, S), np.int32),
    }  # fmt: skip
    return jax.tree.map(jnp.asarray, arguments)


ONE = [([0], [64]), ([0], [64])]
DOCUMENTS = [([3, 4, 5], [7, 1, 60]), ([0, -1], [5, 60])]
PADDING = [([-1], [64]), ([-1, 2, -1], [3, 9, 60])]


@pytest.mark.parametrize(
    "T, S, block, segments",
    [(1, 1, 512, ONE), (17, 17, 512, DOCUMENTS), (33, 33, 8, DOCUMENTS), (32, 32, 8, PADDING), (5, 23, 4, ONE),
     (1, 23, 8, ONE), (13, 13, 1, PADDING)],
)  # fmt: skip
def test_blockwise_against_dense(T, S, block, segments):
    arguments = inputs(T, S, segments)
    cotangents = (normal(2, T, 2, 3, 4, seed=9), np.zeros((2, 3), np.float32))
    expected, expected_gradients = outputs_and_gradients(dense, arguments, cotangents)
    actual, gradients = outputs_and_gradients(blockwise(block), arguments, cotangents)
    assert_close("o", actual[0], expected[0], 1e-5)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)
    assert_gradients_close(gradients, expected_gradients, 1e-5)
    assert not np.any(np.asarray(actual[0])[np.asarray(arguments["q_segment"]) < 0])


def test_large_logits_do_not_overflow():
    arguments = inputs(17, 17, DOCUMENTS)
    arguments |= {"q": 100 * arguments["q"], "k": 100 * arguments["k"]}
    o, peak = blockwise(8)(**arguments)
    assert_close("o", o, dense(**arguments)[0], 1e-5)
    assert peak.max() > 1e4


def test_no_array_of_queries_times_keys():
    """Neither forward nor backward: the largest array is far below T x S."""
    T, block = 2048, 128
    q = jax.ShapeDtypeStruct((1, T, 1, 1, 2), jnp.float32)
    kv = jax.ShapeDtypeStruct((1, T, 1, 2), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def loss(q, k, v, ids):
        return blockwise_attention(q, k, v, ids, ids, ids, ids, SCALE, block)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, kv, kv, ids)
    sizes = [math.prod(x.aval.shape) for e in equations(jaxpr.jaxpr) for x in e.outvars if hasattr(x.aval, "shape")]
    assert max(sizes) < T * T / 16


def test_softmax_is_float32_for_bf16_inputs():
    arguments = inputs(33, 33, ONE)
    low = {n: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x for n, x in arguments.items()}
    o, peak = blockwise(8)(**low)
    assert o.dtype == jnp.bfloat16 and peak.dtype == jnp.float32
    widened = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in low.items()}
    np.testing.assert_allclose(peak, dense(**widened)[1], rtol=1e-5)


@pytest.fixture(scope="module")
def mla():
    config = tiny_config(num_layers=1, mla_layers=(0,), first_dense_layers=1, moe=None)
    model = make_model(config, seed=4)
    return jax.tree.map(lambda x: x[0, 0], model.groups[0][0]).mla


def test_absorbed_form_is_the_expanded_form(mla):
    """The same scale (N + R) ** -0.5 over latents of another width; a cache larger than needed changes nothing."""
    x = jnp.asarray(normal(2, 11, mla.config.hidden_size))
    expanded, _ = jax.jit(lambda m, x: m(x, jnp.zeros((2, 11), jnp.int32)))(mla, x)
    extend = jax.jit(lambda m, *args: m.extend(*args))
    for capacity in (11, 16):
        cache = init_cache(mla.config, 2, capacity, jnp.float32)
        absorbed, _ = extend(mla, x, jnp.zeros((2, 11), jnp.int32), jnp.zeros(2, jnp.int32), cache)
        assert_close(f"capacity {capacity}", absorbed, expanded, 1e-5)


def test_heads_in_groups_are_all_heads(mla, monkeypatch):
    """Where keys and values of all heads would be too large: the same outputs, largest logits and gradients."""
    x, weights = (jnp.asarray(normal(2, 11, mla.config.hidden_size)) for _ in range(2))
    ids = jnp.asarray([[0] * 11, [0] * 5 + [1] * 4 + [-1] * 2], jnp.int32)

    def found():
        def objective(m, x):
            y, peak = m(x, ids)
            return jnp.sum(y * weights), (y, peak)

        gradients, outputs = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(mla, x)
        return [*jax.tree.leaves(outputs), *jax.tree.leaves(gradients)]

    expected = found()
    monkeypatch.setattr("k3_jax.nn.mla.EXPANDED", 1)
    for i, (actual, wanted) in enumerate(zip(found(), expected, strict=True)):
        assert_close(f"output or gradient {i}", actual, wanted, 1e-5)


def test_head_groups():
    assert head_groups(96, 2**20) == 1
    assert head_groups(96, 2**29) == 24  # K3 at 10^6 tokens: four heads at a time
    assert head_groups(96, 2**40) == 96


def test_latent_cache_holds_normalised_latents_and_plain_keys(mla):
    """576 values per token at full size; padding writes nothing."""
    c = mla.config.mla
    x = jnp.asarray(normal(1, 4, mla.config.hidden_size))
    valid = jnp.asarray([[0, 0, 0, -1]], jnp.int32)
    cache = init_cache(mla.config, 1, 6, jnp.float32)
    _, cache = mla.extend(x, valid, jnp.ones(1, jnp.int32), cache)
    latent = np.asarray(cache.latent[0])
    assert latent.shape == (6, c.kv_lora_rank + c.qk_rope_head_dim)
    assert not latent[0].any() and not latent[4:].any()
    a = np.asarray(x[0]).astype(np.float64) @ np.asarray(mla.kv_a[...]).astype(np.float64)
    head, tail = a[:3, : c.kv_lora_rank], a[:3, c.kv_lora_rank :]
    normed = head / np.sqrt((head**2).mean(-1, keepdims=True) + c.latent_norm_eps) * np.asarray(mla.kv_a_norm[...])
    np.testing.assert_allclose(latent[1:4], np.concatenate([normed, tail], -1), rtol=1e-4, atol=1e-5)
