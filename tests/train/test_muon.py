"""Per-Head Muon against a float64 loop over blocks in numpy, written out per parameter, and against itself sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3_jax.train import muon
from k3_jax.train.muon import MuonRule, bind, block_updates, orthogonalize
from k3_jax.train.optimizer import rule_of
from pallas_kernels.common.hlo import read_hlo

SIZES = {"C": 24, "R": 8, "N": 16, "V": 12}


def reference(block):
    """Newton-Schulz of one matrix, times sqrt(max(a, b)); float64."""
    x = block.T if block.shape[0] > block.shape[1] else block
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return np.sqrt(max(block.shape)) * (x.T if block.shape[0] > block.shape[1] else x)


def per_middle_axis(x):
    """[I, H, J]: one block per h."""
    return np.stack([reference(x[:, h]) for h in range(x.shape[1])], axis=1)


def pieces(x, width):
    return np.concatenate([reference(x[:, :width]), reference(x[:, width:])], axis=1)


# name -> (shape of one layer, what is expected for one layer)
CASES = {
    "kda.q": ((32, 3, 8), per_middle_axis),
    "kda.f_b": ((8, 4, 8), per_middle_axis),
    "mla.q_b": ((40, 4, 24), per_middle_axis),
    "mla.kv_b": (
        (24, 4, 28),
        lambda x: np.concatenate([per_middle_axis(x[..., :16]), per_middle_axis(x[..., 16:])], axis=-1),
    ),
    "mla.g": ((32, 4, 12), per_middle_axis),
    "mla.kv_a": ((32, 32), lambda x: pieces(x, 24)),
    "mla.q_a": ((32, 40), reference),
    "kda.o": ((4, 8, 24), lambda x: reference(x.reshape(32, 24)).reshape(x.shape)),
    "moe.w1": ((5, 16, 24), lambda x: np.stack([reference(e) for e in x])),
    "moe.w2": ((5, 24, 16), lambda x: np.stack([reference(e) for e in x])),
    "moe.router": ((32, 12), reference),
}


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def updates(name, x, **kwargs):
    rule = rule_of(name)
    return jax.jit(lambda x: block_updates([x], [bind(rule, name, x.shape, SIZES)], **kwargs)[0])(x)


def rms(x, axis=None):
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=axis))


@pytest.mark.parametrize("name", CASES)
def test_every_block_on_its_own(name):
    shape, expected = CASES[name]
    x = random((2, 1, *shape))
    for layer in range(2):
        x[layer] *= 10.0 ** (-3 * layer)
    got = np.asarray(updates(name, x))
    want = np.stack([expected(x[layer, 0].astype(np.float64))[None] for layer in range(2)])
    assert rms(got - want) < 1e-4 * rms(want)


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (64, 32)])
def test_orthogonal_factor(shape):
    x = random((3, *shape))
    got = np.asarray(orthogonalize(jnp.asarray(x)), np.float64)
    for matrix, update in zip(x.astype(np.float64), got, strict=True):
        u, _, vt = np.linalg.svd(matrix, full_matrices=False)
        core = u.T @ update @ vt.T
        assert np.abs(core - np.diag(np.diag(core))).max() < 1e-3, "the singular vectors are the gradient's"
        assert 0.65 < np.diag(core).min() and np.diag(core).max() < 1.25


@pytest.mark.parametrize("shape", [(128, 4, 32), (32, 4, 128)])
def test_update_rms(shape):
    """1 if the singular values were all 1; the iteration's are 0.7 to 1.2. The same for every head and both shapes."""
    got = rms(updates("kda.q", random(shape)), axis=(0, 2))
    np.testing.assert_allclose(got, 0.82, rtol=0.04)


def test_loud_head_does_not_drown_the_others():
    """One head's gradient 100 times larger: whole-matrix Muon lets it dominate, per-head Muon does not."""
    x = random((16, 4, 8))
    x[:, 2] *= 100
    per_head = rms(updates("kda.q", x), axis=(0, 2))
    whole = rms(updates("kda.f_a", x.reshape(16, 32)).reshape(16, 4, 8), axis=(0, 2))
    assert per_head.max() / per_head.min() < 1.3
    assert whole.max() / whole.min() > 1.5


def test_geometric_head_scales():
    x = random((256, 8, 16)) * np.geomspace(1, 1e-3, 8, dtype=np.float32)[None, :, None]
    per_head = rms(updates("kda.q", x), axis=(0, 2))
    whole = rms(updates("kda.f_a", x.reshape(256, 128)).reshape(x.shape), axis=(0, 2))
    assert per_head.max() / per_head.min() < 1.1
    assert whole.max() / whole.min() > 10


def test_fused_projections_differ_and_heads_do_not_mix():
    gate, up = random((3, 16, 24), 1), random((3, 16, 24), 2)
    fused = np.asarray(updates("moe.w1", np.concatenate([gate, up], axis=-1)))
    apart = np.concatenate([updates("moe.w1", gate), updates("moe.w3", up)], axis=-1)
    assert rms(fused - apart) > 0.05
    q, k = random((32, 2, 8), 1), random((32, 2, 8), 2)
    together = updates("kda.q", np.concatenate([q, k], axis=1))
    np.testing.assert_allclose(together[:, 2:], updates("kda.k", k), atol=1e-5)


def test_halves_of_kv_b_differ_from_one_block():
    x = random((24, 4, 28))
    together = np.stack([reference(x[:, h].astype(np.float64)) for h in range(4)], axis=1)
    assert rms(updates("mla.kv_b", x) - together) > 0.05


def test_expert_without_tokens_stays_finite():
    x = random((4, 16, 24))
    x[1] = 0
    got = np.asarray(updates("moe.w1", x))
    assert (got[1] == 0).all() and np.isfinite(got).all()
    np.testing.assert_allclose(got[[0, 2, 3]], updates("moe.w1", x[[0, 2, 3]]), atol=1e-5)


def test_scale_of_the_gradient_does_not_matter():
    x = random((16, 4, 8))
    np.testing.assert_allclose(updates("kda.q", 1e-4 * x), updates("kda.q", x), rtol=1e-2, atol=1e-3)


def test_bfloat16_products_are_close():
    x = random((64, 4, 16))
    exact, narrow = updates("kda.q", x), updates("kda.q", x, dtype=jnp.bfloat16)
    assert narrow.dtype == jnp.float32
    assert 1e-4 < rms(exact - narrow) < 0.05


def test_groups_of_blocks_give_the_same(monkeypatch):
    x = random((7, 16, 24))
    all_at_once = updates("moe.w1", x)
    monkeypatch.setattr(muon, "_GROUP_SIZE", 3 * 16 * 24)
    np.testing.assert_allclose(updates("moe.w1", x), all_at_once, atol=1e-5)


# layout -> what it asks of the exchange; mesh: data 2, fsdp 2, tensor 2
SHARDED = {
    "heads": ("kda.q", (2, 1, 32, 4, 8), P(None, None, None, "tensor")),
    "rows and heads": ("kda.q", (2, 1, 32, 4, 8), P(None, None, "fsdp", "tensor")),
    "odd number of blocks": ("kda.q", (1, 1, 32, 3, 8), P(None, None, ("fsdp", "tensor"))),
    "one block, rows and columns": ("mla.q_a", (32, 40), P("fsdp", "tensor")),
    "merged rows": ("kda.o", (3, 1, 4, 8, 24), P(None, None, "tensor", None, "fsdp")),
    "cut columns": ("mla.kv_b", (2, 24, 4, 28), P(None, None, "tensor", "fsdp")),
    "cut across shards": ("mla.kv_a", (3, 32, 32), P(None, None, ("tensor", "fsdp"))),
    "experts": ("moe.w2", (2, 4, 24, 16), P(None, "data", "tensor", "fsdp")),
    "replicated": ("moe.router", (2, 32, 12), P()),
}


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.parametrize("case", SHARDED)
def test_sharded_update_is_the_unsharded_one(case, mesh):
    name, shape, spec = SHARDED[case]
    x = random(shape)
    sharded = updates(name, jax.device_put(x, spec))
    assert sharded.sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), len(shape))
    want = updates(name, x)
    assert rms(np.asarray(sharded) - np.asarray(want)) < 1e-5 * rms(want)


def test_whole_blocks_travel_by_all_to_all(mesh):
    """Two exchanges of a shard and no gathering of the whole parameter on every device."""
    x = jax.device_put(random((2, 2, 32, 4, 8)), P(None, None, "fsdp", "tensor"))
    blocks = bind(rule_of("kda.q"), "kda.q", x.shape, SIZES)
    text = jax.jit(lambda x: block_updates([x], [blocks])).lower(x).compile().as_text()
    assert text.count("all-to-all(") == 2
    assert "all-gather" not in text and "all-reduce" not in text


def test_no_device_holds_more_than_its_share(mesh):
    """Nothing in the program is larger than the shard: an owner has as many whole blocks as its shard has numbers."""
    x = jax.device_put(random((8, 1, 32, 4, 8)), P(None, None, "fsdp", "tensor"))
    blocks = bind(rule_of("kda.q"), "kda.q", x.shape, SIZES)
    text = jax.jit(lambda x: block_updates([x], [blocks])).lower(x).compile().as_text()
    sizes = [size for inside in read_hlo(text).values() for op in inside.values() for size, _ in op.arrays]
    assert max(sizes) == x.addressable_shards[0].data.nbytes


def test_heads_that_do_not_divide_are_an_error(mesh):
    with pytest.raises(ValueError, match="evenly divide"):
        jax.device_put(random((32, 3, 8)), P(None, "tensor"))


def test_impossible_shapes_name_the_parameter():
    with pytest.raises(ValueError, match="kda.q: shape"):
        bind(rule_of("kda.q"), "kda.q", (32, 8), SIZES)
    with pytest.raises(ValueError, match="mla.kv_b: shape .* 30 columns"):
        bind(rule_of("mla.kv_b"), "mla.kv_b", (24, 4, 30), SIZES)


def test_kinds():
    assert MuonRule("D H K", rows="D", columns="K").kind == "per head"
    assert MuonRule("H K D", rows="H K", columns="D").kind == "whole"
    assert MuonRule("E L F", rows="L", columns="F").kind == "per expert"
