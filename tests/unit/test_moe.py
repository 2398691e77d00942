"""Stable LatentMoE: routing in float32, dropless grouped experts against a dense oracle, and the grouped product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.nn.linear import situ
from k3_jax.nn.moe import experts_of
from k3_jax.parallel import grouped
from k3_jax.parallel.grouped import grouped_matmul, grouped_outer
from pallas_kernels.common.testing import assert_close, assert_gradients_close, outputs_and_gradients
from tests.models import make_model, tiny_config, to_named
from tests.unit import oracle

CONFIG = tiny_config(num_layers=1, mla_layers=(0,), first_dense_layers=0)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def layer():
    """(LatentMoE, its tensors as the oracle names them)."""
    model = make_model(CONFIG, seed=3)
    named = {name.removeprefix("layers.0."): x for name, x in to_named(model, CONFIG).items()}
    return jax.tree.map(lambda x: x[0, 0], model.groups[0][0]).moe, named


# --- The layer against the oracle ---


def test_layer_against_oracle(layer):
    moe, named = layer
    x = normal(2, 9, CONFIG.hidden_size)
    y, _ = jax.jit(lambda moe, x: moe(x, jnp.zeros((2, 9), jnp.int32)))(moe, jnp.asarray(x))
    expected = [[oracle.moe(token.astype(np.float64), named, CONFIG, []) for token in row] for row in x]
    assert_close("moe", y, np.array(expected), 1e-5)


def test_routing_weights_are_unbiased_scores(layer):
    """The bias changes who is chosen and not with which weight; the sum of weights is the scaling factor."""
    moe, named = layer
    x = normal(2, 9, CONFIG.hidden_size, seed=1)
    p, chosen, _ = moe.route(jnp.asarray(x), jnp.zeros((2, 9), jnp.int32))
    assert p.dtype == jnp.float32
    np.testing.assert_allclose(p.sum(-1), np.full((2, 9), CONFIG.moe.routed_scaling_factor), rtol=1e-6)
    for b, t in np.ndindex(2, 9):
        experts, weights, _ = oracle.route(x[b, t].astype(np.float64), named, CONFIG)
        expected = dict(zip(experts.tolist(), weights, strict=True))
        actual = dict(zip(chosen[b, t].tolist(), p[b, t].tolist(), strict=True))
        assert actual.keys() == expected.keys()
        np.testing.assert_allclose([actual[e] for e in expected], list(expected.values()), rtol=1e-5)


def test_counts_leave_padding_out(layer):
    moe, _ = layer
    x = jnp.asarray(normal(2, 9, CONFIG.hidden_size, seed=2))
    ids = jnp.asarray(np.array([[0] * 9, [0] * 5 + [-1] * 4]), jnp.int32)
    _, chosen, stats = moe.route(x, ids)
    expected = np.bincount(np.asarray(chosen)[np.asarray(ids) >= 0].reshape(-1), minlength=CONFIG.moe.num_experts)
    np.testing.assert_array_equal(stats.load, expected)
    np.testing.assert_array_equal(stats.histogram.sum(-1), [14] * CONFIG.moe.num_experts)


def test_padding_makes_no_expert_busy(layer):
    """Equal tokens would all choose the same experts; padding goes to all in turn, with weight 0."""
    moe, _ = layer
    E, k = CONFIG.moe.num_experts, CONFIG.moe.top_k
    x, ids = jnp.ones((1, 2 * E, CONFIG.hidden_size)), jnp.full((1, 2 * E), -1, jnp.int32)
    p, chosen, _ = moe.route(x, ids)
    assert not p.any()
    np.testing.assert_array_equal(np.bincount(np.asarray(chosen).reshape(-1)), [2 * k] * E)
    assert (np.diff(np.sort(chosen, axis=-1), axis=-1) > 0).all()


def test_bias_gets_no_gradient_and_the_router_does(layer):
    moe, _ = layer
    x = jnp.asarray(normal(2, 9, CONFIG.hidden_size))

    def loss(moe):
        return jnp.sum(moe(x, jnp.zeros((2, 9), jnp.int32))[0] ** 2)

    gradient = jax.jit(jax.grad(loss))(moe)
    assert not np.any(gradient.router_bias[...])
    assert np.any(gradient.router[...])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_router_picks_the_experts_of_float64(dtype):
    """4096 tokens at the released width of choice: 16 of 896. A bf16 product picks another set for 5 %."""
    tokens, D, E, k = 4096, 256, 896, 16
    config = tiny_config(
        num_layers=1, mla_layers=(0,), first_dense_layers=0, hidden_size=D, moe={"num_experts": E, "top_k": k}
    )
    moe = make_block_moe(config)
    router = normal(D, E, seed=5) * D**-0.5
    moe.router = type(moe.router)(jnp.asarray(router, jnp.bfloat16))
    x = jnp.asarray(normal(1, tokens, D, seed=6), dtype)
    chosen = np.sort(np.asarray(jax.jit(moe.route)(x, jnp.zeros((1, tokens), jnp.int32))[1])[0])
    wide = np.asarray(x[0]).astype(np.float64) @ np.asarray(moe.router[...]).astype(np.float64)
    scores = oracle.sigmoid(wide) + np.asarray(moe.router_bias[...])
    expected = np.sort(np.argpartition(-scores, k)[:, :k])
    assert (chosen != expected).any(-1).mean() < 1e-3
    low = np.asarray((x[0].astype(jnp.bfloat16) @ moe.router[...]).astype(jnp.float32)).astype(np.float64)
    picked = np.sort(np.argpartition(-(oracle.sigmoid(low) + np.asarray(moe.router_bias[...])), k)[:, :k])
    assert (picked != expected).any(-1).mean() > 1e-2


def make_block_moe(config):
    return jax.tree.map(lambda x: x[0, 0], make_model(config).groups[0][0]).moe


# --- Routed experts: sorted rows against every expert on every token ---


def dense_experts(z, p, chosen, w1, w3, w2):
    """Every expert on every token, then a weighted sum."""
    h = situ(jnp.einsum("btl,elf->btef", z, w1), jnp.einsum("btl,elf->btef", z, w3), 4.0, 25.0)
    y = jnp.einsum("btef,efl->btel", h, w2)
    weight = jnp.zeros((*z.shape[:2], w1.shape[0])).at[
        jnp.arange(z.shape[0])[:, None, None], jnp.arange(z.shape[1])[None, :, None], chosen
    ].add(p)  # fmt: skip
    return (jnp.einsum("bte,btel->btl", weight, y),)


def sorted_experts(z, p, chosen, w1, w3, w2):
    return (experts_of(z, p, chosen, (w1, w3, w2), config=CONFIG),)


@pytest.mark.parametrize("routing", ["random", "one_hot_expert"])
def test_experts_against_dense(routing):
    B, T, k, L, F, E = 2, 33, 2, 16, 12, 6
    rng = np.random.default_rng(7)
    chosen = np.argsort(rng.random((B, T, E)), -1)[..., :k]
    if routing == "one_hot_expert":  # the others get nothing, or one slot of each token
        chosen[...] = [4, 1]
    arguments = {
        "z": normal(B, T, L, seed=1), "p": np.abs(normal(B, T, k, seed=2)), "chosen": chosen.astype(np.int32),
        "w1": normal(E, L, F, seed=3) / 4, "w3": normal(E, L, F, seed=4) / 4, "w2": normal(E, F, L, seed=5) / 4,
    }  # fmt: skip
    cotangents = (normal(B, T, L, seed=6),)
    arguments = jax.tree.map(jnp.asarray, arguments)
    (expected,), expected_gradients = outputs_and_gradients(dense_experts, arguments, cotangents)
    (actual,), gradients = outputs_and_gradients(sorted_experts, arguments, cotangents)
    assert_close("y", actual, expected, 1e-5)
    assert_gradients_close(gradients, expected_gradients, 1e-5)


def test_combine_is_float32():
    """Weights and expert outputs meet in float32."""
    z, p = jnp.asarray(normal(1, 5, 16), jnp.bfloat16), jnp.asarray(np.abs(normal(1, 5, 2)))
    w = [jnp.asarray(normal(*s, seed=8) / 4, jnp.bfloat16) for s in ((6, 16, 12), (6, 16, 12), (6, 12, 16))]
    chosen = jnp.asarray(np.tile([1, 3], (1, 5, 1)), jnp.int32)
    y = experts_of(z, p, chosen, tuple(w), config=CONFIG)
    assert y.dtype == jnp.float32
    parts = [experts_of(z, jnp.ones((1, 5, 1)), chosen[..., i : i + 1], tuple(w), config=CONFIG) for i in (0, 1)]
    np.testing.assert_allclose(y, p[..., :1] * parts[0] + p[..., 1:] * parts[1], rtol=1e-6, atol=1e-6)


# --- The grouped product ---

SIZES = {
    "even": [50, 50, 50, 50],
    "empty_groups": [0, 130, 0, 70],
    "one_hot_expert": [0, 0, 200, 0],
    "block_edges": [128, 0, 1, 71],
    "all_in_the_first": [200, 0, 0, 0],
}


def loop(x, w, sizes):
    """One product per group, written out by NumPy indices."""
    group = jnp.repeat(jnp.arange(4), sizes, total_repeat_length=200)
    return (jnp.stack([x @ w[g] for g in range(4)])[group, jnp.arange(200)],)


def product(x, w, sizes):
    return (grouped_matmul(x, w, sizes),)


def ragged(x, w, sizes):
    return (grouped._ragged(x, w, sizes),)


@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_products(sizes):
    """The blocked form of this CPU, and the ragged_dot of the other backends, against a loop over groups."""
    x, w, dy = normal(200, 12), normal(4, 12, 7, seed=1), normal(200, 7, seed=2)
    arguments = {"x": jnp.asarray(x), "w": jnp.asarray(w), "sizes": jnp.asarray(SIZES[sizes], jnp.int32)}
    (expected,), gradients = outputs_and_gradients(loop, arguments, (dy,))
    for op in (product, ragged):
        assert_close(op.__name__, op(**arguments)[0], expected, 5e-6)
    for outer in (grouped_outer, grouped._ragged_outer):
        assert_close("dw", outer(jnp.asarray(x), jnp.asarray(dy), arguments["sizes"]), gradients["w"], 5e-6)


def test_grouped_product_of_bf16_accumulates_in_float32():
    x, w = jnp.asarray(normal(200, 256), jnp.bfloat16), jnp.asarray(normal(4, 256, 8, seed=1), jnp.bfloat16)
    y = grouped_matmul(x, w, jnp.asarray(SIZES["even"], jnp.int32))
    assert y.dtype == jnp.float32
    expected = [np.asarray(x[i]).astype(np.float64) @ np.asarray(w[i // 50]).astype(np.float64) for i in range(200)]
    assert_close("y", y, np.stack(expected), 5e-6)
