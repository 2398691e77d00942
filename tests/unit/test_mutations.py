"""Wrong variants of the model must fail the comparisons that the right one passes.

Each mutation replaces one function by a plausible mistake, most of them made by someone before (spec 11.3). What must
notice is the comparison with the oracle, or with the released model's outputs for mistakes in reading a checkpoint.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import ConfigError
from k3_jax.nn import attn_res, kda, mla, moe, norm, transformer
from k3_jax.weights import hf_config, reader
from k3_jax.weights.safetensors import CheckpointError
from pallas_kernels.kda import chunk_kda, kda_from_raw_gate, kda_gate
from tests.models import (
    from_named,
    load_golden,
    logits_of,
    make_model,
    quick_jit,
    random_tokens,
    tiny_config,
    to_named,
)
from tests.unit.oracle import Oracle, assert_logits, expected_logits

# One KDA layer and one MLA layer, one dense FFN and one mixture of experts; no other test compiles this model.
CONFIG = tiny_config(num_layers=2, mla_layers=(1,), attn_res_block=2, vocab_size=47, mla={"qk_nope_head_dim": 6})
SEGMENTS = np.array([[0] * 14, [0] * 6 + [1] * 8])
# Weights of layers whose outputs an epsilon can reach.
SMALL = {"layers.1.mla.q_a": 3e-3, "layers.1.mla.kv_a": 3e-3, "layers.0.kda.q_conv": 1e-3, "layers.0.kda.k_conv": 1e-3}


@pytest.fixture(scope="module", autouse=True)
def forget_mutated_traces():
    """JAX keeps what it traced by the identity of functions, and here the functions that these call change."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def compare():
    """`compare()` and `compare("small")` raise AssertionError unless the model computes what the oracle does."""
    tokens, cases = random_tokens(CONFIG, *SEGMENTS.shape), {}
    for name, scales in (("normal", {}), ("small", SMALL)):
        named = to_named(make_model(CONFIG, seed=1), CONFIG)
        named = {key: (x * scales.get(key, 1)).astype(np.float32) for key, x in named.items()}
        expected = expected_logits(Oracle(named, CONFIG), tokens, SEGMENTS)
        cases[name] = from_named(named, CONFIG), expected

    def compare(name="normal"):
        model, expected = cases[name]
        run = quick_jit(lambda model: model(tokens, jnp.asarray(SEGMENTS, jnp.int32), jnp.float32))
        assert_logits(run(model), expected, SEGMENTS)

    return compare


# --- Mistakes in the model ---


def clamped_softplus_gate(z, A_log, dt_bias, lower_bound):
    """The unbounded gate with a clamp instead of the bounded one."""
    return jnp.maximum(kda_gate(z, A_log, dt_bias, None), lower_bound)


def per_channel_gate(z, A_log, dt_bias, lower_bound):
    """The stored A_log has K entries, padded with zeros: read as one per channel."""
    channels, heads = dt_bias.shape[::-1]
    rate = jnp.pad(A_log, (0, channels - heads))
    swapped = kda_gate(jnp.swapaxes(z, 2, 3), rate, dt_bias.T, lower_bound)
    return jnp.swapaxes(swapped, 2, 3)


def with_gate(wrong):
    """The layer's op, its gate replaced; without a bound, so that any gate is safe."""

    @functools.wraps(wrong)
    def op(q, k, v, z, beta, A_log, dt_bias, *, gate_lower_bound, **options):
        return chunk_kda(q, k, v, wrong(z, A_log, dt_bias, gate_lower_bound), beta, **options)

    return op


def router_in_bf16(self, x, segment_ids):
    """The router's product in bfloat16."""
    logits = jnp.einsum("btd,de->bte", x.astype(jnp.bfloat16), self.router[...].astype(jnp.bfloat16))
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    p, chosen, counts = choose(scores, self.router_bias[...], segment_ids, moe=self.config.moe)
    return p, chosen, moe.RouterStats(*counts)


def bias_in_the_weights(scores, bias, segment_ids, *, moe):
    """Combine weights from the biased scores."""
    return choose(scores + bias[None, None], jnp.zeros_like(bias), segment_ids, moe=moe)


def norm_after_up_projection(monkeypatch):
    """The latent norm's gain stays where it is, its division moves behind the projection."""

    def late(subscripts, x, weight, letters, out):
        y = project(subscripts, x, weight, letters, out)
        return y if subscripts != "btl,ld->btd" else rms_norm(y, jnp.ones(y.shape[-1]), 1e-5)

    monkeypatch.setattr(moe, "rms_norm", lambda u, weight, eps: u * weight[None, None])
    monkeypatch.setattr(moe, "project", late)


def no_read_out(bank, rows, r, key, eps):
    """The last running sum instead of the last mixture."""
    return r, None


def scores_of_raw_sources(sources, key, eps):
    return jnp.einsum("...d,d->...", sources, key)


def one_document(ids):
    return jnp.where(ids < 0, ids, 0)


def conv_across_documents(u, weight, segment_ids, context, context_ids):
    """Only the convolution crosses."""
    return short_conv(u, weight, one_document(segment_ids), context, one_document(context_ids))


def state_across_documents(*args, segment_ids, **kwargs):
    """Only the recurrent state crosses."""
    return kda_from_raw_gate(*args, segment_ids=one_document(segment_ids), **kwargs)


def attention_across_documents(q_nope, q_pe, kv, k_pe, segment_ids, **options):
    """Only attention crosses."""
    return attend(q_nope, q_pe, kv, k_pe, one_document(segment_ids), **options)


def latent_norm_of_other_epsilon(x, weight, eps):
    """1e-5, as in all other norms (spec 3.1)."""
    return rms_norm(x, weight, 1e-5)


def silu_gate(x, gate, weight, eps):
    """x * sigmoid(x) instead of sigmoid(x) as KDA's output gate."""
    return gated_rms_norm(x, gate, weight, eps) * gate


def mla_silu_gate(self, x, o):
    """The same in MLA."""
    return output(self, x, o * mla.project("btd,dhv->bthv", x, self.g, "DHV", "BTHV"))


def l2_epsilon_on_the_mean(x):
    """P7."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * x.shape[-1] ** -0.5


def l2_epsilon_as_a_floor(x):
    """P7."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)


def scale_of_the_latent(*arrays, scale, start):
    """(C + R) ** -0.5, the width of the absorbed keys, instead of (N + R) ** -0.5."""
    return attend(*arrays, scale=CONFIG.mla.cache_dim**-0.5, start=start)


short_conv, gated_rms_norm = kda.short_conv, kda.gated_rms_norm
attend, output, rms_norm = mla.mla_attention, mla.MLA._output, norm.rms_norm
choose, project = moe._choose, moe.project

# (object, attribute, what replaces it, weights that show it)
MUTATIONS = [
    (kda, "kda_from_raw_gate", with_gate(clamped_softplus_gate), "normal"),
    (kda, "kda_from_raw_gate", with_gate(per_channel_gate), "normal"),
    (kda, "short_conv", conv_across_documents, "normal"),
    (kda, "kda_from_raw_gate", state_across_documents, "normal"),
    (kda, "gated_rms_norm", silu_gate, "normal"),
    (kda, "l2_norm", l2_epsilon_on_the_mean, "small"),
    (kda, "l2_norm", l2_epsilon_as_a_floor, "small"),
    (mla, "mla_attention", attention_across_documents, "normal"),
    (mla, "mla_attention", scale_of_the_latent, "normal"),
    (mla, "rms_norm", latent_norm_of_other_epsilon, "small"),
    (mla.MLA, "_output", mla_silu_gate, "normal"),
    (moe.LatentMoE, "route", router_in_bf16, "normal"),
    (moe, "_choose", bias_in_the_weights, "normal"),
    (attn_res, "scores", scores_of_raw_sources, "normal"),
    (transformer, "mix", no_read_out, "normal"),
]


@pytest.mark.parametrize("weights", ["normal", "small"])
def test_the_right_model_passes(compare, weights):
    compare(weights)


@pytest.mark.parametrize("owner, name, wrong, weights", [pytest.param(*m, id=m[2].__name__) for m in MUTATIONS])
def test_mutation_fails(compare, monkeypatch, owner, name, wrong, weights):
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match="logits differ"):
        compare(weights)


def test_norm_after_up_projection_fails(compare, monkeypatch):
    norm_after_up_projection(monkeypatch)
    with pytest.raises(AssertionError, match="logits differ"):
        compare()


# --- Mistakes in reading a checkpoint ---


def compare_with_golden():
    """Raises unless the released checkpoint gives the released model's logits."""
    model, _, expected = load_golden("k3_tiny_c")
    logits = logits_of(model, jnp.asarray(expected["input_ids"], jnp.int32))
    assert_logits(logits, expected["logits"], np.zeros_like(expected["input_ids"]), 5e-4)


def test_the_right_reader_passes():
    compare_with_golden()


def test_swapped_nibbles_fail(monkeypatch):
    """Group statistics cannot show it: every value is on the grid."""
    decode = reader.mxfp4_decode
    monkeypatch.setattr(reader, "mxfp4_decode", lambda packed, *args: decode((packed >> 4) | (packed << 4), *args))
    with pytest.raises(AssertionError, match="logits differ"):
        compare_with_golden()


def test_layer_lists_read_as_0_based_fail(monkeypatch):
    """Every mixer would shift by one: the tensors of a layer are then not those that its kind expects."""
    lists = hf_config._mla_layers

    def shifted(linear, num_layers):
        return tuple(i + 1 for i in lists(linear, num_layers) if i + 1 < num_layers)

    monkeypatch.setattr(hf_config, "_mla_layers", shifted)
    with pytest.raises((CheckpointError, ConfigError), match="layers.3"):
        compare_with_golden()
