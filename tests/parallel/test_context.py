"""Kimi Delta Attention over ranks that share a sequence, against one device: outputs, states, all gradients."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3_jax.parallel import context
from pallas_kernels.common.testing import assert_close, assert_gradients_close, outputs_and_gradients, relative_rms
from pallas_kernels.kda import chunk_kda

B, T, H, HV, K, V = 2, 96, 1, 2, 8, 6


def ids_of(kind: str) -> np.ndarray:
    """[B, T]; eight ranks hold 12 tokens each."""
    t = np.arange(T)
    rows = {
        "one_document": (0 * t, 0 * t),
        "crossing": ((t >= 17).astype(int) + (t >= 70), (t >= 5).astype(int) + (t >= 6) + (t >= 90)),
        "at_the_edges": ((t >= 24).astype(int) + (t >= 36), (t >= 12).astype(int) + (t >= 84)),
        "padded": (np.where(t < 50, t // 20, -1), np.where(t < 11, 0, -1)),
        "padding_inside": (np.where((t >= 30) & (t < 65), -1, t // 80), np.where(t % 7 == 3, -1, t // 40)),
        "only_padding": (0 * t - 1, np.where(t > 90, 4, -1)),
    }
    return np.stack(rows[kind]).astype(np.int32)


LAYOUTS = ("one_document", "crossing", "at_the_edges", "padded", "padding_inside", "only_padding")


def arguments(kind: str, gate: float) -> dict:
    """Gates between `gate` / 2 and `gate`, keys that resemble each other."""
    rng = np.random.default_rng(5)
    keys = rng.normal(size=(B, 1, H, K)) + 0.7 * rng.normal(size=(B, T, H, K))
    drawn = {
        "q": rng.normal(size=(B, T, H, K)) / K**0.5,
        "k": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "v": rng.normal(size=(B, T, HV, V)),
        "g": gate * rng.uniform(0.5, 1, size=(B, T, HV, K)),
        "beta": rng.uniform(0.1, 1, size=(B, T, HV)),
        "initial_state": rng.normal(size=(B, HV, K, V)),
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()} | {"segment_ids": jnp.asarray(ids_of(kind))}


def attend(q, k, v, g, beta, initial_state, segment_ids):
    return chunk_kda(q, k, v, g, beta, initial_state=initial_state, segment_ids=segment_ids)


def alone(**given):
    return attend(**given)


def sharded(ranks: int):
    """A new function for every call: what is patched is traced."""
    mesh = jax.make_mesh((ranks,), ("context",), devices=jax.devices()[:ranks])
    tokens = P(None, "context")
    specs = (*[tokens] * 5, P(), tokens)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=(tokens, P()))
    def local(*operands):
        return context.context_kda(attend, *operands, axis="context")

    def run(q, k, v, g, beta, initial_state, segment_ids):
        operands = (q, k, v, g, beta, initial_state, segment_ids)
        return local(*(jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)))

    return run


by_ranks = functools.cache(sharded)


@functools.cache
def expected(kind: str, gate: float):
    return outputs_and_gradients(alone, arguments(kind, gate), cotangents())


def cotangents():
    rng = np.random.default_rng(6)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in ((B, T, HV, V), (B, HV, K, V)))


@pytest.mark.parametrize("gate", [-1e-3, -1.0])
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_together_are_one_device(ranks, kind, gate):
    (o, state), gradients = outputs_and_gradients(by_ranks(ranks), arguments(kind, gate), cotangents())
    (wanted_o, wanted_state), wanted = expected(kind, gate)
    assert_close("o", o, wanted_o, 1e-5)
    assert_close("state", state, wanted_state, 1e-5)
    assert_gradients_close(gradients, wanted, 1e-4)


def sum_of_states(later, earlier):
    return later[0] @ earlier[0], later[1] + earlier[1]


def decays_only(later, earlier):
    """As if keys wrote nothing: the transition's diagonal."""
    diagonal = jnp.diagonal(later[0], axis1=-2, axis2=-1)[..., None]
    return diagonal * earlier[0], diagonal * earlier[1] + later[1]


@pytest.mark.parametrize("wrong", [sum_of_states, decays_only])
@pytest.mark.parametrize("ranks", [2, 8])
def test_wrong_compositions_fail_at_slow_decay(ranks, wrong):
    """With gates near -5 nothing of an earlier rank survives, and both would pass."""
    given = arguments("one_document", -1e-3)
    with mock.patch.object(context, "kda_combine", wrong):
        o, _ = jax.jit(sharded(ranks))(**given)
    assert relative_rms(o, expected("one_document", -1e-3)[0][0]) > 1e-2


def test_documents_that_end_with_a_rank_are_told_apart():
    with mock.patch.object(context, "continues", lambda ids, axis: jnp.ones(B, bool)):
        o, _ = jax.jit(sharded(8))(**arguments("at_the_edges", -1e-3))
    assert relative_rms(o, expected("at_the_edges", -1e-3)[0][0]) > 1e-2


@functools.partial(jax.jit, static_argnums=0)
def halo_of(width: int, x, ids):
    mesh = jax.make_mesh((8,), ("context",))
    first = jnp.full((B, width), -5.0), jnp.full((B, width), 9)
    cut = jax.shard_map(
        lambda *tokens: context.halo(tokens, first, "context"),
        mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"),
    )  # fmt: skip
    return cut(*(jax.reshard(y, NamedSharding(mesh, P(None, "context"))) for y in (x, ids)))


def test_halo_is_the_left_neighbours_end():
    x, ids = jnp.arange(B * T, dtype=jnp.float32).reshape(B, T), jnp.arange(T)[None].repeat(B, 0)
    left, left_ids = halo_of(3, x, ids)
    before = (12 * np.arange(1, 8)[:, None] + np.arange(-3, 0)).reshape(-1)
    np.testing.assert_array_equal(left, np.concatenate([np.full((B, 3), -5.0), np.asarray(x)[:, before]], axis=1))
    np.testing.assert_array_equal(left_ids[0], [9] * 3 + before.tolist())
    with pytest.raises(ValueError, match="12 tokens per rank of the 'context' axis: expected at least 13"):
        halo_of(13, x, ids)
