"""Kimi Delta Attention over ranks that share rows, in both layouts, against one device: outputs, states, gradients."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3_jax.parallel import context, fragments
from k3_jax.parallel.fragments import FRAGMENTS, Layout
from pallas_kernels.common.testing import assert_close, assert_gradients_close, outputs_and_gradients, relative_rms
from pallas_kernels.kda import chunk_kda

B, T, H, HV, K, V = 2, 96, 1, 2, 8, 6


@pytest.fixture(autouse=True)
def sent_as_on_a_tpu(monkeypatch):
    """By ppermute."""
    monkeypatch.setattr(fragments, "on_tpu", lambda: True)


def ids_of(kind: str) -> np.ndarray:
    """[B, T]; eight ranks hold 12 tokens each, in one fragment or in two."""
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


def sharded(axis: str, ranks: int):
    """A new function for every call: what is patched is traced. Rows are in order outside."""
    mesh = jax.make_mesh((ranks,), (axis,), devices=jax.devices()[:ranks])
    layout = Layout(axis, ranks, FRAGMENTS[axis])
    tokens = P(None, axis)
    specs = (*[tokens] * 5, P(), tokens)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=(tokens, P()))
    def local(*operands):
        *rows, initial_state, ids = operands
        o, state = context.context_kda(attend, *map(layout.split, rows), initial_state, layout.split(ids), layout)
        return layout.join(o), state

    def run(q, k, v, g, beta, initial_state, segment_ids):
        *rows, ids = (x[:, order_of(layout)] for x in (q, k, v, g, beta, segment_ids))
        operands = (*rows, initial_state, ids)
        operands = (jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True))
        o, state = local(*operands)
        return jax.reshard(o, NamedSharding(mesh, P()))[:, np.argsort(order_of(layout))], state

    return run


def order_of(layout: Layout) -> np.ndarray:
    """[T]: which position of a row stands where it is cut."""
    numbers = [layout.number(rank, slot) for rank in range(layout.ranks) for slot in range(layout.fragments)]
    return np.arange(T).reshape(layout.total, -1)[numbers].reshape(-1)


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
@pytest.mark.parametrize("axis", FRAGMENTS)
def test_ranks_together_are_one_device(axis, ranks, kind, gate):
    (o, state), gradients = outputs_and_gradients(by_ranks(axis, ranks), arguments(kind, gate), cotangents())
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
@pytest.mark.parametrize("axis", FRAGMENTS)
def test_wrong_compositions_fail_at_slow_decay_only(axis, ranks, wrong):
    """Where a token keeps less than e^-15 of the state, nothing of earlier fragments counts, and both pass."""
    with mock.patch.object(context, "kda_combine", wrong):
        run = jax.jit(sharded(axis, ranks))
        slow, fast = (run(**arguments("one_document", gate))[0] for gate in (-1e-3, -30.0))
    assert relative_rms(slow, expected("one_document", -1e-3)[0][0]) > 1e-2
    assert_close("o", fast, alone_at(-30.0), 1e-5)


@functools.cache
def alone_at(gate: float):
    return jax.jit(alone)(**arguments("one_document", gate))[0]


@pytest.mark.parametrize("axis", FRAGMENTS)
def test_documents_that_end_with_a_fragment_are_told_apart(axis):
    with mock.patch.object(context, "continues", lambda ids, layout: jnp.ones(len(ids), bool)):
        o, _ = jax.jit(sharded(axis, 8))(**arguments("at_the_edges", -1e-3))
    assert relative_rms(o, expected("at_the_edges", -1e-3)[0][0]) > 1e-2


@functools.partial(jax.jit, static_argnums=(0, 1))
def halo_of(axis: str, width: int, x, ids):
    """[B, N, width] and its ids, fragments in order."""
    mesh, layout = jax.make_mesh((8,), (axis,)), Layout(axis, 8, FRAGMENTS[axis])

    def local(*tokens):
        rows = tuple(layout.split(x) for x in tokens)
        first = jnp.full((len(rows[0]), width), -5.0), jnp.full((len(rows[0]), width), 9)
        return tuple(x.reshape(B, -1, width) for x in context.halo(rows, first, layout))

    cut = jax.shard_map(local, mesh=mesh, in_specs=P(None, axis), out_specs=P(None, axis))
    found = cut(*(jax.reshard(y[:, order_of(layout)], NamedSharding(mesh, P(None, axis))) for y in (x, ids)))
    return [layout.in_order(jax.reshard(y, NamedSharding(mesh, P()))) for y in found]


@pytest.mark.parametrize("axis", FRAGMENTS)
def test_halo_is_the_end_of_the_fragment_before(axis):
    x, ids = jnp.arange(B * T, dtype=jnp.float32).reshape(B, T), jnp.arange(T)[None].repeat(B, 0)
    left, left_ids = halo_of(axis, 3, x, ids)
    fragments, length = 8 * FRAGMENTS[axis], 12 // FRAGMENTS[axis]
    before = length * np.arange(1, fragments)[:, None] + np.arange(-3, 0)
    np.testing.assert_array_equal(left[:, 0], np.full((B, 3), -5.0))
    np.testing.assert_array_equal(left[:, 1:], np.asarray(x)[:, before])
    np.testing.assert_array_equal(left_ids[0], [[9] * 3, *before])
    with pytest.raises(ValueError, match=f"{length} tokens per fragment of the '{axis}' axis: expected at least 13"):
        halo_of(axis, 13, x, ids)
