"""The activation manager: every tensor that a recipe may keep, in every form, against computing all of them again."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import ACTIVATIONS, ConfigError, Keep, Offload, Quantize, TrainConfig
from k3_jax.nn import depth
from k3_jax.nn.activations import dequantize, quantize, restore, store
from pallas_kernels.common.testing import assert_gradients_close, relative_rms
from tests.models import abstract_model, make_model, quick_jit, tiny_config, to_named

CONFIG = tiny_config(num_layers=2, mla_layers=(1,), attn_res_block=2)
IDS = jnp.asarray([[0] * 9, [0] * 3 + [1] * 4 + [-1] * 2], jnp.int32)


@functools.cache
def gradients(policy):
    model, rng = make_model(CONFIG, seed=3), np.random.default_rng(0)
    r, dr = (jnp.asarray(rng.normal(size=(2, 9, CONFIG.hidden_size)), jnp.float32) for _ in range(2))

    def objective(model, r):
        return jnp.sum(depth.run_layers(model.depth, policy, *model._layers(), r, IDS)[0] * dr)

    of_model, of_r = quick_jit(jax.grad(objective, argnums=(0, 1)))(model, r)
    return to_named(of_model, CONFIG) | {"r": np.asarray(of_r)}


@pytest.mark.slow
def test_all_kept_gives_the_same_gradients():
    everything = tuple(Keep(name) for name in ACTIVATIONS)
    assert_gradients_close(gradients(everything), gradients(()), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_kept_alone(name):
    assert_gradients_close(gradients((Keep(name),)), gradients(()), 1e-5)


@pytest.mark.slow
def test_offloaded_tensors_come_back():
    everything = tuple(Keep(name, (Offload(),)) for name in ACTIVATIONS)
    assert_gradients_close(gradients(everything), gradients(()), 1e-5)


@pytest.mark.slow
def test_quantised_tensors_change_gradients_by_their_rounding():
    rounded = gradients(tuple(Keep(name, (Quantize(), Offload())) for name in ("layer_input", "kda_output")))
    errors = [relative_rms(rounded[name], x, floor=1e-3) for name, x in gradients(()).items()]
    assert 1e-3 < max(errors) < 0.5


def kept(policy) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what the backward pass finds of the MLA layer, from the public function alone."""
    r, ids = jax.ShapeDtypeStruct((2, 16, CONFIG.hidden_size), jnp.bfloat16), jax.ShapeDtypeStruct((2, 16), jnp.int32)
    groups, numbers = abstract_model(CONFIG)._layers()

    def forward(groups, r, ids):
        bank = depth.empty_bank(r, CONFIG)
        return depth.forward(abstract_model(CONFIG).depth, policy, groups, numbers, r, bank, ids)[3]

    return jax.eval_shape(forward, groups, r, ids)[1][0]


def test_only_what_the_policy_names_is_kept():
    assert set(kept(())) == {"layer_input"}
    found = kept((Keep("mla_latent", (Quantize(),)), Keep("moe_output"), Keep("kda_qkv")))
    assert set(found) == {"layer_input", "mla_latent", "moe_output"}  # it is no KDA layer
    numbers, scales = found["mla_latent"]
    assert numbers.dtype == jnp.float8_e4m3fn and scales.dtype == jnp.float32
    assert math.prod(numbers.shape) == 2 * 16 * CONFIG.mla.cache_dim and math.prod(scales.shape) == 2 * 16
    assert found["moe_output"].dtype == jnp.bfloat16


def test_experts_run_once_less_if_their_output_is_kept():
    """Counted in the program, which has one body for all layers: the three products of their forward pass are gone
    from the backward pass."""
    config = tiny_config(num_layers=4, mla_layers=(), first_dense_layers=0, attn_res_block=4)

    def products(policy):
        r = jax.ShapeDtypeStruct((2, 16, config.hidden_size), jnp.float32)
        model = abstract_model(config)
        objective = lambda model, r: depth.run_layers(model.depth, policy, *model._layers(), r, IDS16)[0].sum()  # noqa: E731
        return quick_jit(jax.grad(objective)).lower(model, r).compile().as_text().count(" dot(")

    assert products(()) - products((Keep("moe_output"),)) == 3


IDS16 = jnp.zeros((2, 16), jnp.int32)


def test_quantised_blocks():
    """E4M3 has three bits of mantissa: half an ulp is 1/16 of the number at worst. Blocks are scaled apart."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 5, 256)) * np.repeat([1e-6, 1e6], 128), jnp.float32)
    numbers, scale = quantize(x)
    assert numbers.shape == x.shape and scale.shape == (3, 5, 2)
    back = dequantize(numbers, scale, jnp.float32)
    for half in (slice(0, 128), slice(128, 256)):
        assert relative_rms(back[..., half], x[..., half]) < 0.04
    assert jnp.isfinite(dequantize(*quantize(jnp.zeros((2, 128))), jnp.float32)).all()


def test_store_and_restore_compose():
    x = jnp.linspace(-1, 1, 128, dtype=jnp.bfloat16)[None]
    for through, error in (((), 0), ((Offload(),), 0), ((Quantize(),), 0.04), ((Quantize(), Offload()), 0.04)):
        keep = Keep("moe_output", through)
        back = jax.jit(lambda x: restore(keep, store(keep, x), x.dtype))(x)  # noqa: B023
        assert back.dtype == x.dtype and relative_rms(back, x) <= error


def test_wrong_policies_are_refused():
    with pytest.raises(ConfigError, match="Keep.name = 'kda_q': expected one of layer_input"):
        Keep("kda_q")
    with pytest.raises(ConfigError, match="Keep.through"):
        Keep("kda_qkv", (Offload(), Quantize()))
    with pytest.raises(ConfigError, match="each name once"):
        TrainConfig(steps=1, activations=(Keep("kda_qkv"), Keep("kda_qkv", (Offload(),))))
