"""Small parts against tables of the specification and against float64: SiTU, norms, gate, convolution, AttnRes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3_jax.nn.attn_res import AttnRes, empty_summary, merge, mix, scores
from k3_jax.nn.block import push
from k3_jax.nn.grouping import Depth
from k3_jax.nn.kda import conv_context, short_conv
from k3_jax.nn.layout import abstract_layers
from k3_jax.nn.linear import MLP, situ
from k3_jax.nn.norm import gated_rms_norm, l2_norm, rms_norm
from pallas_kernels.common.testing import assert_close
from pallas_kernels.kda import kda_gate
from tests.models import abstract_model, make_model, tiny_config, to_named
from tests.unit import oracle

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_for_every_selection_of_tests():
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# --- SiTU and MLP (spec 5.1) ---

SITU_TABLE = [(0, 1, 0), (1, 1, 0.715818), (-1, 1, -0.263335), (4, 25, 56.959320), (10, 30, 82.245822),
              (-10, 30, -0.00373395), (100, 1000, 100.0)]  # fmt: skip


@pytest.mark.parametrize("gate, up, expected", SITU_TABLE)
def test_situ_table(gate, up, expected):
    actual = situ(jnp.float32(gate)[None], jnp.float32(up)[None], 4.0, 25.0)
    np.testing.assert_allclose(actual, [expected], rtol=2e-6, atol=1e-9)


def test_situ_is_computed_in_float32_and_rounded_once():
    gate, up = (jnp.asarray(4 * normal(64), jnp.bfloat16) for _ in range(2))
    actual = situ(gate, up, 4.0, 25.0)
    assert actual.dtype == jnp.bfloat16
    exact = situ(gate.astype(jnp.float32), up.astype(jnp.float32), 4.0, 25.0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(actual, exact)


def test_mlp_is_the_glu_of_the_oracle():
    config = tiny_config(num_layers=1, mla_layers=(), first_dense_layers=1, moe=None)
    model = make_model(config)
    block = jax.tree.map(lambda x: x[0, 0], model.groups[0][0])
    assert isinstance(block.dense, MLP)
    x = normal(2, 3, config.hidden_size)
    expected = oracle.glu(x.astype(np.float64), to_named(model, config), "layers.0.dense.", config)
    assert_close("mlp", block.dense(jnp.asarray(x)), expected, 1e-6)


# --- Norms ---


def test_rms_norm_rounds_before_the_weight():
    """The released order: normalise in float32, round, then times the weight in x's type (spec 11.1)."""
    x, weight = jnp.asarray(normal(7, 32), jnp.bfloat16), jnp.asarray(1 + 0.3 * normal(32), jnp.bfloat16)
    x64 = np.asarray(x).astype(np.float64)
    normed = jnp.asarray(x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5), jnp.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, weight, 1e-5), normed * weight[None])
    once = (normed.astype(jnp.float32) * weight.astype(jnp.float32)[None]).astype(jnp.bfloat16)
    x32 = x.astype(jnp.float32)
    late = x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5) * weight.astype(jnp.float32)[None]
    assert (late.astype(jnp.bfloat16) != once).any()  # the two orders differ on this input


def test_rms_norm_statistics_are_float32():
    x = jnp.full((1, 4096), 3.0, jnp.bfloat16).at[0, 0].set(200.0)
    expected = 3 / np.sqrt((4095 * 9 + 200.0**2) / 4096)
    np.testing.assert_allclose(float(rms_norm(x, jnp.ones(4096), 1e-5)[0, 1]), expected, rtol=2**-8)


def test_gated_rms_norm_is_sigmoid_after_the_norm():
    x, gate, weight = normal(5, 2, 8), normal(5, 2, 8), normal(8)
    expected = oracle.sigmoid(gate.astype(np.float64)) * np.apply_along_axis(oracle.rms, -1, x, weight, 1e-5)
    assert_close(
        "gated norm", gated_rms_norm(jnp.asarray(x), jnp.asarray(gate), jnp.asarray(weight), 1e-5), expected, 1e-6
    )


@pytest.mark.parametrize("amplitude", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_l2_norm_epsilon_is_on_the_sum(amplitude):
    """Pitfall P7: on the mean, or outside the root, small vectors come out up to 87 % wrong."""
    x = amplitude * normal(6, 128)
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).sum(-1, keepdims=True) + 1e-6)
    assert_close("l2 norm", l2_norm(jnp.asarray(x)), expected, 1e-6)


# --- Decay gate (spec 2.2) ---

GATE_TABLE = [(0, 0, -2.5), (0, 2, -4.403985), (0.5, 2, -4.821705), (-0.4684, -3, -0.663089), (1.0066, 1, -4.695670)]


@pytest.mark.parametrize("A_log, z, expected", GATE_TABLE)
def test_gate_table(A_log, z, expected):
    """The bias counts as part of z: it is added before the product with exp(A_log)."""
    bias = 0.375
    actual = kda_gate(jnp.full((1, 1, 1, 1), z - bias), jnp.full(1, float(A_log)), jnp.full((1, 1), bias), -5.0)
    np.testing.assert_allclose(float(actual[0, 0, 0, 0]), expected, rtol=1e-6)


def test_gate_has_one_rate_per_head():
    """Square on purpose: H = K hides a per-channel reading."""
    z, A_log, bias = 3 * normal(1, 1, 4, 4), normal(4), normal(4, 4)
    for bound in (-5.0, None):
        actual = kda_gate(jnp.asarray(z), jnp.asarray(A_log), jnp.asarray(bias), bound)[0, 0]
        assert_close("gate", actual, oracle.gate(z[0, 0].astype(np.float64), A_log, bias, bound), 1e-6)


# --- Short convolution ---


def conv_oracle(u, weight, ids, context):
    """Token by token with an explicit list of past inputs; `context` continues the row's first document."""
    out, past, previous = np.zeros(u.shape), list(context), ids[0]
    for t in range(len(u)):
        if ids[t] < 0:
            continue
        if ids[t] != previous:
            past = [np.zeros(u.shape[1:])] * (len(weight) - 1)
        previous, past = ids[t], [*past, u[t]]
        out[t] = oracle.silu(sum(w * x for w, x in zip(weight, past[-len(weight) :], strict=True)))
    return out


@pytest.mark.parametrize("width", [1, 2, 4])
def test_short_conv_against_token_by_token(width):
    u, weight, context = normal(3, 9, 2, 3), normal(width, 2, 3), normal(3, width - 1, 2, 3)
    ids = np.array([[0] * 9, [2] * 4 + [3] * 3 + [4, -1], [1] * 1 + [2] * 8], np.int32)
    context_ids = np.repeat(ids[:, :1], width - 1, axis=1)
    actual = short_conv(*(jnp.asarray(x) for x in (u, weight, ids, context, context_ids)))
    expected = np.stack([conv_oracle(u[b], weight, ids[b], context[b]) for b in range(3)])
    live = ids >= 0
    assert_close("conv", np.asarray(actual)[live], expected[live], 1e-6)


@pytest.mark.parametrize("counts", [(5, 0, 1), (2, 3, 4)])
def test_conv_context_is_the_last_live_inputs(counts):
    u, context = normal(3, 5, 3, 2, 2), normal(3, 3, 3, 2, 2)
    ids = np.where(np.arange(5)[None] < np.array(counts)[:, None], 0, -1).astype(np.int32)
    actual = conv_context(jnp.asarray(u), jnp.asarray(ids), jnp.asarray(context))
    for b, count in enumerate(counts):
        np.testing.assert_array_equal(actual[b], np.concatenate([context[b], u[b, :count]])[-3:])


# --- Attention residuals (spec 4) ---


def test_attn_res_toy():
    bank, r = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2), jnp.array([0.0, 2.0]).reshape(1, 1, 2)
    mixture, entropy = mix(bank, 1, r, jnp.array([1.0, 0.5]), 1e-12)
    p = np.array([0.66976, 0.33024])
    np.testing.assert_allclose(mixture[0, 0], [0.66976, 0.66048], rtol=2e-5)
    np.testing.assert_allclose(entropy[0, 0], -(p * np.log(p)).sum(), rtol=2e-5)


@pytest.mark.parametrize("rows", range(5))
def test_mix_against_oracle(rows):
    """Rows of the bank that are not there yet count for nothing, even when they hold NaN-free rubbish."""
    bank, r, gain, query = 1e3 * normal(4, 2, 3, 8), normal(2, 3, 8), normal(8), normal(8)
    bank[:rows] /= 1e3
    mixture, entropy = mix(jnp.asarray(bank), rows, jnp.asarray(r), jnp.asarray(gain * query), 1e-5)
    for b in range(2):
        for t in range(3):
            expected = oracle.mix([*bank[:rows, b, t].astype(np.float64), r[b, t]], gain, query, 1e-5)
            np.testing.assert_allclose(mixture[b, t], expected, rtol=1e-4, atol=1e-6)
    assert (np.asarray(entropy) <= np.log(rows + 1) + 1e-6).all()
    if rows == 0:
        np.testing.assert_array_equal(mixture, r)


def test_zero_query_is_a_uniform_average_of_the_raw_sources():
    """What the initial model does: scores are of normalised sources, the mixture is of raw ones."""
    bank, r = normal(3, 2, 3, 8), normal(2, 3, 8)
    site = AttnRes(tiny_config(hidden_size=8), rngs=nnx.Rngs(0))
    mixture, entropy = mix(jnp.asarray(bank), 2, jnp.asarray(r), site.key(), 1e-5)
    np.testing.assert_allclose(mixture, (bank[0] + bank[1] + r) / 3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(entropy, np.full((2, 3), np.log(3)), rtol=1e-6)


def test_scores_are_float32_for_bf16_sources():
    """The mixture is rounded once: the same numbers as with widened sources."""
    bank, r = (jnp.asarray(normal(*shape), jnp.bfloat16) for shape in ((3, 2, 3, 64), (2, 3, 64)))
    key = jnp.asarray(normal(64))
    assert scores(bank, key, 1e-5).dtype == jnp.float32
    wide, _ = mix(bank.astype(jnp.float32), 3, r.astype(jnp.float32), key, 1e-5)
    mixture, _ = mix(bank, 3, r, key, 1e-5)
    np.testing.assert_array_equal(mixture, wide.astype(jnp.bfloat16))


SOURCES = {0: (0, 2), 1: (2, 2), 11: (2, 2), 12: (2, 3), 13: (3, 3), 23: (3, 3), 24: (3, 4), 36: (4, 5), 48: (5, 6),
           60: (6, 7), 72: (7, 8), 84: (8, 9), 85: (9, 9), 92: (9, 9)}  # fmt: skip


@pytest.fixture(scope="module")
def sites():
    """93 layers of AttnRes alone at width 8: each sublayer's output is its site's number times a fixed vector plus
    the mixture. Returns the mixtures [2 L + 1] of the one-phase and of the two-phase form, and the row counts."""
    config = tiny_config(
        num_layers=93, mla_layers=(), first_dense_layers=93, moe=None, hidden_size=8, attn_res_block=12
    )
    L, S, eps = config.num_layers, config.attn_res_block, config.norm_eps
    keys = jnp.asarray(2 * normal(2 * L + 1, 8))
    padded = jnp.zeros((2 * S * config.num_attn_res_blocks + 1, 8)).at[: 2 * L + 1].set(keys)
    embedding, directions = jnp.asarray(normal(1, 2, 8)), jnp.asarray(normal(2 * L, 8))
    bank = jnp.zeros((config.num_attn_res_blocks, 1, 2, 8))

    def sublayer(site, h):
        return 0.3 * directions[site][None, None] + 0.1 * jnp.tanh(h)

    def one_phase(carry, layer):
        r, bank = carry
        first = layer % S == 0
        h0, _ = mix(bank, -(-layer // S), r, keys[2 * layer], eps)
        bank = jnp.where(first, bank.at[layer // S].set(r), bank)
        a = sublayer(2 * layer, h0)
        r = jnp.where(first, a, r + a)
        h1, _ = mix(bank, layer // S + 1, r, keys[2 * layer + 1], eps)
        return (r + sublayer(2 * layer + 1, h1), bank), jnp.stack([h0, h1])

    def two_phase(carry, layer):
        r, bank, summary = carry
        h0 = merge(summary, (2 * layer - 1) % (2 * S), r, keys[2 * layer], eps)
        bank, summary = push(bank, summary, padded, layer, r, config)
        a = sublayer(2 * layer, h0)
        r = jnp.where(layer % S == 0, a, r + a)
        h1 = merge(summary, 2 * layer % (2 * S), r, keys[2 * layer + 1], eps)
        return (r + sublayer(2 * layer + 1, h1), bank, summary), jnp.stack([h0, h1])

    layers = jnp.arange(L)
    (r, one_bank), one = jax.lax.scan(one_phase, (embedding, bank), layers)
    last, _ = mix(one_bank, config.num_attn_res_blocks, r, keys[2 * L], eps)
    start = (embedding, bank, empty_summary(2 * S, embedding))
    (r, two_bank, summary), two = jax.lax.scan(two_phase, start, layers)
    merged = merge(summary, (2 * L - 1) % (2 * S), r, keys[2 * L], eps)
    np.testing.assert_allclose(two_bank, one_bank, rtol=1e-4, atol=1e-5)

    def flat(mixtures, read_out):
        return np.concatenate([np.asarray(mixtures).reshape(2 * L, 1, 2, 8), read_out[None]])

    return flat(one, last), flat(two, merged)


def test_two_phase_is_one_phase_at_every_site(sites):
    one, two = sites
    for site, (a, b) in enumerate(zip(one, two, strict=True)):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5, err_msg=f"site {site} (layer {site // 2})")


def test_source_counts_of_93_layers():
    """Spec 4.4, by the oracle's own bookkeeping; the model uses ceil(L / 12) and floor(L / 12) + 1 rows and r."""
    config = tiny_config(num_layers=93, mla_layers=(), first_dense_layers=93, moe=None, hidden_size=2, vocab_size=3,
                         dense_dim=2, kda={"num_heads": 1, "head_dim": 2}, attn_res_block=12)  # fmt: skip
    shapes = abstract_layers(abstract_model(config), Depth(config))
    model = oracle.Oracle({name: normal(*x.shape) for name, x in shapes.items()}, config)
    model.token(0)
    for layer, (attention, ffn) in SOURCES.items():
        assert model.sources[2 * layer : 2 * layer + 2] == [attention, ffn]
        assert (0 if layer == 0 else -(-layer // 12) + 1, layer // 12 + 2) == (attention, ffn)
    assert model.sources[-1] == 9 == config.num_attn_res_blocks + 1
    assert sum(n > 0 for n in model.sources) == 186
