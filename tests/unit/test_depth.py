"""Depth: the grouping of layers, the custom gradient of the scan, and the size of deep programs."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import K3Config, MeshConfig
from k3_jax.nn import depth
from k3_jax.nn.block import Kind, kind
from k3_jax.nn.grouping import Depth, Group
from k3_jax.plan.step import lower_train_step
from pallas_kernels.common.testing import assert_gradients_close, equations
from tests.models import abstract_model, make_model, quick_jit, run_of, tiny_config, to_named

KDA_DENSE, KDA_MOE, MLA_MOE = Kind(False, False), Kind(False, True), Kind(True, True)


def deep_config(num_layers: int) -> K3Config:
    """K3's layer lists (every fourth layer MLA, and the last) at a tiny width."""
    mla = (*range(3, num_layers - 1, 4), num_layers - 1)
    return tiny_config(num_layers=num_layers, mla_layers=mla, attn_res_block=12)


def test_plan_of_k3():
    assert Depth(deep_config(93)).groups == (
        Group(0, 1, ((KDA_DENSE, 1),)),
        Group(1, 1, ((KDA_MOE, 2),)),
        Group(3, 22, ((MLA_MOE, 1), (KDA_MOE, 3))),
        Group(91, 1, ((MLA_MOE, 2),)),
    )


def test_plans_hold_every_layer_once_in_order_and_of_its_kind():
    rng = np.random.default_rng(0)
    for _ in range(200):
        layers = int(rng.integers(1, 30))
        mla = tuple(np.flatnonzero(rng.random(layers) < rng.choice([0.0, 0.2, 0.5, 1.0])).tolist())
        config = tiny_config(num_layers=layers, mla_layers=mla, first_dense_layers=int(rng.integers(0, layers + 1)))
        order = []
        plan = Depth(config)
        for group, runs in zip(plan.groups, plan.numbers, strict=True):
            assert all(x.shape == (group.repeat, count) for x, (_, count) in zip(runs, group.runs, strict=True))
            for numbers, (k, _) in zip(runs, group.runs, strict=True):
                assert all(kind(config, int(layer)) == k for layer in numbers.reshape(-1))
            order += np.concatenate(runs, axis=1).reshape(-1).tolist()
        assert order == list(range(layers))


# The mixers' period of 2 and AttnRes blocks of 3 never line up.
UNALIGNED = tiny_config(num_layers=6, mla_layers=(1, 3, 5), first_dense_layers=6, moe=None, attn_res_block=3)


def test_gradients_are_those_of_plain_autodiff():
    """`run_layers` differentiates itself; autodiff of its forward scan is the judge, for parameters, input and bank."""
    config, model = UNALIGNED, make_model(UNALIGNED, seed=2)
    rng = np.random.default_rng(0)
    r = jnp.asarray(rng.normal(size=(2, 7, config.hidden_size)), jnp.float32)
    dr = jnp.asarray(rng.normal(size=r.shape), jnp.float32)
    dbank = jnp.asarray(rng.normal(size=(config.num_attn_res_blocks, *r.shape)), jnp.float32)
    segment_ids = jnp.asarray([[0] * 7, [0] * 3 + [1] * 2 + [-1] * 2], jnp.int32)

    def objective(run, model, r):
        r, bank = run(model.depth, (), *model._layers(), r, segment_ids)[:2]
        return jnp.sum(r * dr) + jnp.sum(bank * dbank), r

    def gradients(run):
        grad = quick_jit(jax.grad(lambda model, r: objective(run, model, r), argnums=(0, 1), has_aux=True))
        (of_model, of_r), output = grad(model, r)
        return to_named(of_model, config) | {"r": np.asarray(of_r)}, output

    expected, expected_r = gradients(plain_forward)
    actual, actual_r = gradients(depth.run_layers)
    np.testing.assert_allclose(actual_r, expected_r, rtol=1e-5, atol=1e-5)
    assert_gradients_close(actual, expected, 1e-4)
    assert np.any(actual["layers.4.attn_res.query"])
    # Layer 0 has no other source than the embedding: its first site learns nothing.
    assert not np.any(actual["layers.0.attn_res.query"])


def plain_forward(layers, policy, groups, numbers, r, segment_ids):
    return depth.forward(layers, policy, groups, numbers, r, depth.empty_bank(r, layers.config), segment_ids)


def residual_sizes(run, config):
    """Elements of every array that the backward pass keeps, apart from the model itself."""
    r = jax.ShapeDtypeStruct((2, 16, config.hidden_size), jnp.float32)
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    groups, numbers = abstract_model(config)._layers()

    def vjp(groups, r, ids):
        return jax.vjp(lambda groups, r: run(Depth(config), (), groups, numbers, r, ids)[:2], groups, r)[1]

    parameters = {x.shape for x in jax.tree.leaves(groups)}
    kept = jax.tree.leaves(jax.eval_shape(vjp, groups, r, ids))
    return sum(math.prod(x.shape) for x in kept if x.shape not in parameters), math.prod(r.shape)


def test_bank_is_not_saved_per_layer():
    """Kept: each layer's input and one bank. Autodiff of the scan keeps a bank, and more, for every layer."""
    config = tiny_config(num_layers=24, mla_layers=(), first_dense_layers=24, moe=None, attn_res_block=3)
    kept, activation = residual_sizes(depth.run_layers, config)
    assert kept <= (config.num_layers + config.num_attn_res_blocks + 1) * activation
    plain, _ = residual_sizes(plain_forward, config)
    assert plain > config.num_layers * config.num_attn_res_blocks * activation


@pytest.mark.slow
def test_gradients_of_93_layers_are_as_small_a_program_as_those_of_33():
    def size(layers: int) -> int:
        config = deep_config(layers)
        loss = lambda model, tokens: jnp.sum(model.hidden(tokens)[0].astype(jnp.float32))  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss))(abstract_model(config), jax.ShapeDtypeStruct((1, 16), jnp.int32))
        return sum(1 for _ in equations(jaxpr.jaxpr))

    assert size(93) < 1.1 * size(33)


@pytest.mark.slow
def test_train_step_of_93_layers_compiles():
    start = time.perf_counter()
    lowered(93).compile()
    print(f"93 layers traced and compiled in {time.perf_counter() - start:.0f} s")


def lowered(layers: int):
    return lower_train_step(run_of(deep_config(layers), MeshConfig()), jax.devices()[:1], "cpu")
