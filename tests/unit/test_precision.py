"""Which numbers are float32, and which products are exact, in both precision policies: read off the jaxpr.

A CPU computes every float32 product exactly, whatever is asked for; a TPU's default would be one bfloat16 pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.nn.attn_res import merge, mix, summarise
from k3_jax.nn.grouping import Depth
from k3_jax.nn.layout import abstract_layers
from pallas_kernels.common.testing import equations, relative_rms
from tests.models import abstract_model, make_model, random_tokens, tiny_config

# Every size is another number, so that a shape names what it belongs to.
B, T = 2, 19
CONFIG = tiny_config(
    num_layers=4, mla_layers=(2,), vocab_size=53, kda={"num_heads": 5}, mla={"num_heads": 3, "v_head_dim": 7},
    moe={"num_experts": 6},
)  # fmt: skip
HIGHEST = jax.lax.Precision.HIGHEST
ALWAYS_FLOAT32 = {"q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "o_norm", "router_bias"}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return jnp.dtype(request.param)


@pytest.fixture(scope="module")
def jaxprs(dtype):
    """Loss and gradients, and a cached step, with parameters and activations in `dtype`."""
    model = abstract_model(CONFIG, dtype)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def loss(model, tokens):
        return model(tokens, None, dtype).sum()

    def step(model, tokens):
        return model.extend(tokens, jnp.zeros_like(tokens), model.init_cache(B, 24, dtype), dtype)

    return {
        "training": jax.make_jaxpr(jax.value_and_grad(loss))(model, tokens).jaxpr,
        "prefill": jax.make_jaxpr(step)(model, tokens).jaxpr,
        "decode": jax.make_jaxpr(step)(model, jax.ShapeDtypeStruct((B, 1), jnp.int32)).jaxpr,
    }


def products(jaxpr):
    return [e for e in equations(jaxpr) if e.primitive.name in ("dot_general", "ragged_dot_general")]


@pytest.mark.parametrize("program", ["training", "prefill", "decode"])
def test_every_float32_product_asks_for_highest_precision(jaxprs, dtype, program):
    """The exceptions: attention's backward multiplies float32 cotangents of scores and outputs with bfloat16 q, k, p
    and v, and the head's that of the logits with its input and weight. A bfloat16 pass is what the policy means there.
    """
    inexact = [e for e in products(jaxprs[program]) if e.params["precision"] not in (HIGHEST, (HIGHEST, HIGHEST))]
    widths = [sum(x.aval.dtype == jnp.float32 for x in e.invars[:2]) for e in inexact]
    assert 2 not in widths
    assert widths.count(1) == (6 if program == "training" and dtype == jnp.bfloat16 else 0)


@pytest.mark.parametrize("program", ["training", "prefill", "decode"])
def test_router_product_is_float32_with_highest_precision(jaxprs, program):
    """Both operands, and so the result, whatever the activations are."""
    length, E = 1 if program == "decode" else T, CONFIG.moe.num_experts
    routers = [e for e in products(jaxprs[program]) if e.outvars[0].aval.shape == (B, length, E)]
    assert routers
    for e in routers:
        assert {x.aval.dtype for x in (*e.invars, *e.outvars)} == {jnp.dtype("float32")}
        assert e.params["precision"] == (HIGHEST, HIGHEST)


def test_attn_res_is_float32_with_highest_precision(dtype):
    D = CONFIG.hidden_size
    bank, r = jax.ShapeDtypeStruct((4, B, T, D), dtype), jax.ShapeDtypeStruct((B, T, D), dtype)
    key, keys = jax.ShapeDtypeStruct((D,), jnp.float32), jax.ShapeDtypeStruct((6, D), jnp.float32)

    def one_phase(bank, r, key):
        return mix(bank, 3, r, key, 1e-5)

    def two_phase(bank, r, key, keys):
        return merge(summarise(bank, 3, keys, 1e-5), 1, r, key, 1e-5)

    for jaxpr in (jax.make_jaxpr(one_phase)(bank, r, key), jax.make_jaxpr(two_phase)(bank, r, key, keys)):
        found = products(jaxpr.jaxpr)
        assert len(found) >= 3
        for e in found:
            assert {x.aval.dtype for x in (*e.invars, *e.outvars)} == {jnp.dtype("float32")}
            assert e.params["precision"] == (HIGHEST, HIGHEST)
        assert jaxpr.out_avals[0].dtype == dtype


FUNCTIONS = {"exp", "exp2", "log", "log1p", "tanh", "logistic", "rsqrt", "sqrt", "cumsum", "erf", "top_k", "sort"}


def test_functions_of_a_bfloat16_model_are_float32(jaxprs, dtype):
    """Softmaxes, norms, gates, decays, SiTU, router: all but MLA's output gate, as in the released model."""
    for name, jaxpr in jaxprs.items():
        rounded = [
            (e.primitive.name, e.invars[0].aval.shape)
            for e in equations(jaxpr)
            if e.primitive.name in FUNCTIONS and e.invars[0].aval.dtype == jnp.bfloat16
        ]
        gate = ("logistic", (B, 1 if name == "decode" else T, CONFIG.mla.num_heads, CONFIG.mla.v_head_dim))
        assert set(rounded) <= {gate}
        assert (gate in rounded) == (dtype == jnp.bfloat16)


def test_sums_are_float32(jaxprs):
    """No reduction adds up bfloat16 numbers, but for gradients of broadcasts."""
    for name in ("prefill", "decode"):
        sums = [e for e in equations(jaxprs[name]) if e.primitive.name == "reduce_sum"]
        assert sums and all(e.invars[0].aval.dtype != jnp.bfloat16 for e in sums)


def test_float32_tensors_stay_float32(dtype):
    """Gates, convolutions, KDA's output norm and the router's bias; everything else is as asked."""
    for name, x in abstract_layers(abstract_model(CONFIG, dtype), Depth(CONFIG)).items():
        assert x.dtype == (jnp.float32 if name.rsplit(".", 1)[-1] in ALWAYS_FLOAT32 else dtype), name


def test_kda_state_is_float32(dtype):
    cache = jax.eval_shape(lambda: abstract_model(CONFIG).init_cache(B, 24, dtype))
    states = [state for runs in cache.layers for state in runs]
    assert {x.S.dtype for x in states if hasattr(x, "S")} == {jnp.dtype("float32")}
    assert {x.conv.dtype for x in states if hasattr(x, "conv")} == {dtype}
    assert {x.latent.dtype for x in states if hasattr(x, "latent")} == {dtype}


def test_bfloat16_model_is_near_the_float32_model():
    """A few percent of rounding, and logits in float32."""
    config = tiny_config(num_layers=2, mla_layers=(1,))
    model, tokens = make_model(config, seed=1), random_tokens(config, 2, 12)
    run = jax.jit(lambda model, tokens, dtype: model(tokens, None, dtype), static_argnums=2)
    low, high = run(model, tokens, jnp.bfloat16), run(model, tokens, jnp.float32)
    assert low.dtype == high.dtype == jnp.float32
    assert 1e-4 < relative_rms(np.asarray(low), np.asarray(high)) < 0.05
