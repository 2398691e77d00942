"""The optimizer as a whole: a rule per parameter, decoupled decay, precision, modules as pytrees, sharding, QK-clip."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3_jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig, OptimizerConfig
from k3_jax.train.optimizer import RULES, AdamWRule, FrozenRule, describe, make_optimizer, rule_of
from k3_jax.train.qk_clip import qk_clip
from k3_jax.train.schedule import learning_rate

MODEL = K3Config(
    vocab_size=64,
    hidden_size=32,
    num_layers=4,
    mla_layers=(3,),
    kda=KDAConfig(num_heads=4, head_dim=8),
    mla=MLAConfig(4, q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    dense_dim=48,
    moe=MoEConfig(num_experts=8, top_k=2, latent_dim=16, expert_dim=24, shared_dim=48),
)
CONFIG = OptimizerConfig(learning_rate=0.01)
STEPS = 100

# canonical name -> (shape of one layer, stored layout)
LAYER = {
    "attn_res.norm": ((32,), ""),
    "attn_res.query": ((32,), ""),
    "attn_norm": ((32,), ""),
    "ffn_res.norm": ((32,), ""),
    "ffn_res.query": ((32,), ""),
    "ffn_norm": ((32,), ""),
    "kda.q": ((32, 4, 8), "fsdp tensor"),
    "kda.k": ((32, 4, 8), "fsdp tensor"),
    "kda.v": ((32, 4, 8), "fsdp tensor"),
    "kda.g": ((32, 4, 8), "fsdp tensor"),
    "kda.q_conv": ((4, 4, 8), "- tensor"),
    "kda.k_conv": ((4, 4, 8), "- tensor"),
    "kda.v_conv": ((4, 4, 8), "- tensor"),
    "kda.f_a": ((32, 8), "fsdp"),
    "kda.f_b": ((8, 4, 8), "- tensor"),
    "kda.dt_bias": ((4, 8), "tensor"),
    "kda.A_log": ((4,), "tensor"),
    "kda.b": ((32, 4), "fsdp tensor"),
    "kda.o_norm": ((8,), ""),
    "kda.o": ((4, 8, 32), "tensor - fsdp"),
    "mla.q_a": ((32, 40), "fsdp"),
    "mla.q_a_norm": ((40,), ""),
    "mla.q_b": ((40, 4, 24), "- tensor"),
    "mla.kv_a": ((32, 32), "fsdp"),
    "mla.kv_a_norm": ((24,), ""),
    "mla.kv_b": ((24, 4, 28), "- tensor"),
    "mla.g": ((32, 4, 12), "fsdp tensor"),
    "mla.o": ((4, 12, 32), "tensor - fsdp"),
    "dense.gate": ((32, 48), "fsdp tensor"),
    "dense.up": ((32, 48), "fsdp tensor"),
    "dense.down": ((48, 32), "tensor fsdp"),
    "moe.router": ((32, 8), "fsdp"),
    "moe.router_bias": ((8,), ""),
    "moe.latent_down": ((32, 16), "fsdp"),
    "moe.latent_norm": ((16,), ""),
    "moe.latent_up": ((16, 32), "- fsdp"),
    "moe.w1": ((8, 16, 24), "data fsdp tensor"),
    "moe.w3": ((8, 16, 24), "data fsdp tensor"),
    "moe.w2": ((8, 24, 16), "data tensor fsdp"),
    "moe.shared.gate": ((32, 48), "fsdp tensor"),
    "moe.shared.up": ((32, 48), "fsdp tensor"),
    "moe.shared.down": ((48, 32), "tensor fsdp"),
}
TOP = {
    "embed": ((64, 32), "tensor fsdp"),
    "output_attn_res.norm": ((32,), ""),
    "output_attn_res.query": ((32,), ""),
    "norm": ((32,), ""),
    "lm_head": ((32, 64), "fsdp tensor"),
}
STACK = (2, 1)
ALL = tuple(LAYER | TOP)
# one of each rule and layout: the others would only compile
SOME = tuple("attn_norm kda.A_log kda.q kda.o mla.kv_a mla.kv_b moe.router_bias moe.w1 moe.w2 embed".split())


def shape_of(name):
    return STACK + LAYER[name][0] if name in LAYER else TOP[name][0]


def spec_of(name):
    axes = [None if axis == "-" else axis for axis in (LAYER | TOP)[name][1].split()]
    return P(*([None] * len(STACK) if name in LAYER else []), *axes)


def random_tree(seed, scale=1.0, names=SOME):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=shape_of(name)), jnp.float32) for name in names}


def optimizer(names=SOME, ns_dtype=jnp.float32):
    return make_optimizer(CONFIG, {name: name for name in names}, STEPS, model=MODEL, ns_dtype=ns_dtype)


TX = optimizer()
INIT, UPDATE = jax.jit(TX.init), jax.jit(TX.update)


def run(params, gradients, init=INIT, update=UPDATE):
    """Parameters and state after one step per gradient tree."""
    state = init(params)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def rate(step):
    return float(learning_rate(CONFIG, STEPS)(step))


def test_every_parameter_has_exactly_one_rule():
    listed = [name for _, group in RULES for name in group]
    assert sorted(listed) == sorted(LAYER | TOP), "the table lists the model's parameters, each once"
    assert rule_of("layers.17.kda.q") == rule_of("kda.q")


def test_missing_and_double_rules_name_the_parameter():
    with pytest.raises(ValueError, match="'layers.3.kda.new' has 0 optimizer rules"):
        rule_of("layers.3.kda.new")
    with pytest.raises(ValueError, match="'norm' has 2 optimizer rules"):
        rule_of("norm", (*RULES, (FrozenRule(), ("norm",))))
    with pytest.raises(ValueError, match="'kda.new' has 0"):
        make_optimizer(CONFIG, {"x": "kda.new"}, 10, model=MODEL, ns_dtype=jnp.float32)


def test_the_table():
    kinds = {name: rule_of(name).kind for name in LAYER | TOP}
    per_head = {name for name, kind in kinds.items() if kind == "per head"}
    assert per_head == {"mla.q_b", "mla.kv_b", "mla.g", *(f"kda.{x}" for x in ("q", "k", "v", "g", "f_b"))}
    assert {name for name, kind in kinds.items() if kind == "per expert"} == {"moe.w1", "moe.w3", "moe.w2"}
    whole = {name for name, kind in kinds.items() if kind == "whole"}
    assert {"kda.o", "mla.o", "kda.f_a", "mla.q_a", "mla.kv_a", "moe.router", "moe.latent_down"} < whole
    undecayed = {name for name in kinds if rule_of(name) == AdamWRule(decays=False)}
    assert {"norm", "kda.A_log", "kda.dt_bias", "attn_res.query"} < undecayed
    assert not undecayed & {"embed", "lm_head", "kda.b"}


def test_a_step_of_all_parameters_traces():
    tx = optimizer(ALL)
    params = random_tree(0, names=ALL)
    updates, _ = jax.eval_shape(lambda params: tx.update(params, tx.init(params), params), params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def test_wrong_shape_names_the_parameter_when_made():
    params = random_tree(0)
    params["mla.kv_b"] = params["mla.kv_b"][..., :-1]
    with pytest.raises(ValueError, match="mla.kv_b"):
        TX.init(params)
    with pytest.raises(ValueError, match=f"made for {len(params)} parameters and got 1"):
        TX.init({"embed": params["embed"]})


def test_describe():
    shapes = {"embed": (64, 32), "layers.0.kda.q": (32, 4, 8), "layers.1.kda.q": (32, 4, 8)}
    shapes |= {"layers.3.mla.kv_b": (24, 4, 28), "layers.3.moe.router_bias": (8,)}
    embed, q, kv_b, bias = describe(CONFIG, MODEL, shapes)
    assert (embed.optimizer, embed.blocks, embed.weight_decay) == ("adamw", 0, 0.1)
    assert (q.name, q.count, q.kind, q.blocks, q.block_shapes) == ("kda.q", 2, "per head", 4, ((32, 8),))
    assert q.scale == (pytest.approx(0.2 * 32**0.5),)
    assert (kv_b.blocks, kv_b.block_shapes) == (8, ((24, 16), (24, 12)))
    assert (bias.optimizer, bias.weight_decay) == ("none", 0)


def test_update_size_is_the_learning_rate_times_the_rms():
    params = random_tree(0, 0.0)
    updates, _ = UPDATE(random_tree(1), INIT(params), params)
    for name in ("kda.q", "mla.kv_a", "mla.kv_b", "moe.w1", "kda.o"):
        assert np.sqrt(np.mean(updates[name] ** 2)) == pytest.approx(0.2 * rate(1), rel=0.2), name
    assert float(jnp.vdot(updates["kda.q"], random_tree(1)["kda.q"])) < 0, "downhill"


def test_first_step_moves_the_weights():
    params = random_tree(0)
    after, _ = run(params, [random_tree(1)])
    assert [name for name in params if (after[name] == params[name]).all()] == ["moe.router_bias"]


def test_weight_decay_is_decoupled():
    params, zero = random_tree(0), random_tree(0, 0.0)
    after, _ = run(params, [zero])
    for name, before in params.items():
        decay = 0.0 if rule_of(name) in (AdamWRule(decays=False), FrozenRule()) else 0.1
        np.testing.assert_allclose(after[name], before * (1 - rate(1) * decay), rtol=1e-6, err_msg=name)


def test_adamw_part_is_adamw():
    params, gradients = random_tree(0), [random_tree(seed, 1e-3) for seed in (1, 2, 3)]
    assert max(float(optax.tree.norm(gradient)) for gradient in gradients) < CONFIG.grad_clip
    after, _ = run(params, gradients)
    reference = optax.adamw(
        lambda count: learning_rate(CONFIG, STEPS)(count + 1), b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1
    )
    embeds = [{"embed": gradient["embed"]} for gradient in gradients]
    want, _ = run({"embed": params["embed"]}, embeds, reference.init, reference.update)
    np.testing.assert_allclose(after["embed"], want["embed"], rtol=1e-5, atol=1e-7)


def test_nesterov_momentum():
    """Step 2 orthogonalises 0.95 (0.95 g1 + g2) + g2."""
    g1, g2 = random_tree(1, 1e-3), random_tree(2, 1e-3)
    zero = random_tree(0, 0.0)
    _, state = UPDATE(g1, INIT(zero), zero)
    second, _ = UPDATE(g2, state, zero)
    blended = jax.tree.map(lambda a, b: (0.95 * (0.95 * a + b) + b) / 4, g1, g2)
    direct, _ = UPDATE(blended, INIT(zero), zero)
    np.testing.assert_allclose(second["kda.q"] / rate(2), direct["kda.q"] / rate(1), atol=1e-4)


def test_clipping_by_global_norm_leaves_frozen_gradients_out():
    params, gradients = random_tree(0), random_tree(1)
    wild = dict(gradients, **{"moe.router_bias": jnp.full(shape_of("moe.router_bias"), 1e6)})
    calm, state = run(params, [gradients])
    after, _ = run(params, [wild])
    np.testing.assert_array_equal(after["moe.router_bias"], params["moe.router_bias"])
    np.testing.assert_array_equal(after["embed"], calm["embed"])
    trained = [g for name, g in gradients.items() if name != "moe.router_bias"]
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in trained))
    momentum = optax.tree.get(state, "momentum")
    np.testing.assert_allclose(momentum["kda.q"], gradients["kda.q"] / norm, rtol=1e-5)


def test_experts_without_tokens_only_decay():
    params, gradients = random_tree(0), random_tree(1)
    for name in ("moe.w1", "moe.w2"):
        gradients[name] = gradients[name].at[:, :, 3].set(0)
    after, _ = run(params, [gradients])
    np.testing.assert_allclose(after["moe.w1"][:, :, 3], params["moe.w1"][:, :, 3] * (1 - 0.1 * rate(1)), rtol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in after.values())


def test_moments_are_float32_for_bfloat16_parameters():
    params, gradients = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_tree(seed)) for seed in (0, 1))
    tx = optimizer(ns_dtype=jnp.bfloat16)
    updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    floats = [x for x in jax.tree.leaves((updates, state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}


class Stack(nnx.Module):
    """A callable module: Optax must not take it for a function of parameters."""

    def __init__(self):
        self.q = nnx.Param(jnp.ones((2, 1, 32, 4, 8)))
        self.norms = nnx.List([nnx.Param(jnp.ones(32))])
        self.bias = nnx.Param(jnp.ones((2, 1, 8)))

    def __call__(self, x):
        raise AssertionError("called by the optimizer")


def test_modules_as_pytrees():
    model = Stack()
    labels = jax.tree.unflatten(jax.tree.structure(model), ["moe.router_bias", "norm", "kda.q"])
    tx = make_optimizer(CONFIG, labels, 10, model=MODEL, ns_dtype=jnp.float32)
    gradient = jax.tree.map(lambda x: x * jax.random.normal(jax.random.key(0), x.shape), model)
    after, state = run(model, [gradient], tx.init, jax.jit(tx.update))
    assert isinstance(after, Stack) and isinstance(optax.tree.get(state, "momentum"), Stack)
    np.testing.assert_array_equal(after.bias[...], 1)
    assert (after.q[...] != 1).all() and (after.norms[0][...] != 1).all()


def test_sharded_step_is_the_unsharded_one():
    trees = [random_tree(0, 0.1), random_tree(1), random_tree(2)]
    want, _ = run(trees[0], trees[1:])
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh):
        params, *gradients = ({n: jax.device_put(x, spec_of(n)) for n, x in tree.items()} for tree in trees)
        got, state = run(params, gradients)
    for name, leaf in got.items():
        assert leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec_of(name)), leaf.ndim), name
        difference = np.linalg.norm(np.asarray(leaf) - np.asarray(want[name])) / np.linalg.norm(want[name])
        assert difference < 1e-5, (name, difference)
    for moment in ("momentum", "mu", "nu"):
        for name, leaf in optax.tree.get(state, moment).items():
            if isinstance(leaf, jax.Array):
                assert leaf.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec_of(name)), leaf.ndim), (moment, name)


def logits(q_b, kv_b, queries, latents, rope_key):
    """[H, T, S] and the parts' sizes as in MODEL: content plus the key that all heads share."""
    q = jnp.einsum("tq,qhd->thd", queries, q_b)
    k = jnp.einsum("sc,chd->shd", latents, kv_b)[..., :16]
    return jnp.einsum("thn,shn->hts", q[..., :16], k) + jnp.einsum("thr,sr->hts", q[..., 16:], rope_key)


def test_qk_clip_brings_loud_heads_to_the_threshold():
    q_b, kv_b, queries, latents, rope_key = (
        jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
        for shape in ((40, 4, 24), (24, 4, 28), (32, 40), (32, 24), (32, 8))
    )
    inputs = (queries, latents, rope_key)
    before = logits(q_b, kv_b, *inputs).max(axis=(1, 2))
    threshold = float(jnp.sort(before)[1:3].mean())
    new_q, new_kv = qk_clip(q_b, kv_b, before, threshold=threshold, nope_dim=16)
    after = logits(new_q, new_kv, *inputs).max(axis=(1, 2))
    np.testing.assert_allclose(after, jnp.minimum(before, threshold), rtol=1e-5)
    quiet = np.asarray(before <= threshold)
    assert 0 < quiet.sum() < 4
    np.testing.assert_array_equal(new_q[:, quiet], q_b[:, quiet])
    np.testing.assert_array_equal(new_kv[:, quiet], kv_b[:, quiet])
    np.testing.assert_array_equal(new_kv[..., 16:], kv_b[..., 16:])


def test_qk_clip_of_stacked_bfloat16_layers():
    q_b, kv_b = (leaf.astype(jnp.bfloat16) for leaf in random_tree(0, names=("mla.q_b", "mla.kv_b")).values())
    maxima = jnp.full((*STACK, 4), 50.0).at[1, 0, 2].set(400.0)
    new_q, new_kv = qk_clip(q_b, kv_b, maxima, threshold=100.0, nope_dim=16)
    assert new_q.dtype == new_kv.dtype == jnp.bfloat16
    np.testing.assert_array_equal(new_q[1, 0, :, 2, :16], q_b[1, 0, :, 2, :16] / 2)
    np.testing.assert_array_equal(new_q[1, 0, :, 2, 16:], q_b[1, 0, :, 2, 16:] / 4)
    np.testing.assert_array_equal(new_q[0], q_b[0])
    np.testing.assert_array_equal(new_kv[1, 0, :, 2, :16], kv_b[1, 0, :, 2, :16] / 2)
