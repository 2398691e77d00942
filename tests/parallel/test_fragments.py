"""Which positions ranks hold: every fragment once, as many causal pairs on every rank, there and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from k3_jax.config import ConfigError, MeshConfig
from k3_jax.mesh import make_mesh
from k3_jax.parallel import fragments
from k3_jax.parallel.fragments import FRAGMENTS, Layout, arranged, whole

RANKS = [1, 2, 3, 8]


def numbers(layout: Layout) -> np.ndarray:
    """[R, F]."""
    return np.array([[layout.number(r, slot) for slot in range(layout.fragments)] for r in range(layout.ranks)])


@pytest.mark.parametrize("axis", FRAGMENTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_fragment_has_one_place(axis, ranks):
    layout = Layout(axis, ranks, FRAGMENTS[axis])
    held = numbers(layout)
    assert sorted(held.flat) == list(range(layout.total))
    assert (np.diff(held, axis=1) > 0).all()
    np.testing.assert_array_equal(layout.in_order(jnp.asarray(held.reshape(1, -1)))[0], np.arange(layout.total))


@pytest.mark.parametrize("ranks", RANKS)
def test_zigzag_balances_causal_attention(ranks):
    pairs = {axis: numbers(Layout(axis, ranks, FRAGMENTS[axis])).sum(1) for axis in FRAGMENTS}
    assert len(set(pairs["zigzag"])) == 1
    assert len(set(pairs["context"])) == ranks


@pytest.mark.parametrize("axis", FRAGMENTS)
@pytest.mark.parametrize("by", [-3, -1, 1, 2, 5, 16])
@pytest.mark.parametrize("tpu", [False, True])
def test_shift(tpu, axis, by, monkeypatch):
    monkeypatch.setattr(fragments, "on_tpu", lambda: tpu)
    layout = Layout(axis, 8, FRAGMENTS[axis])
    N, mesh = layout.total, jax.make_mesh((8,), (axis,))

    def shifted():
        own = layout.numbers(2 * layout.fragments)
        return layout.gather(layout.shift(own + jnp.repeat(jnp.array([100, 200]), layout.fragments), by))

    # Every rank gathers the same, side by side.
    found = jax.jit(jax.shard_map(shifted, mesh=mesh, in_specs=(), out_specs=P(None, axis)))()
    source = np.arange(N) - by
    wanted = np.where((source >= 0) & (source < N), np.array([[100], [200]]) + source, 0)
    np.testing.assert_array_equal(found, np.tile(wanted, 8))


IN_ORDER = list(range(8))
MESHES = [
    (MeshConfig(data=4), IN_ORDER),
    (MeshConfig(context=4), IN_ORDER),
    (MeshConfig(zigzag=4), [0, 1, 14, 15, 2, 3, 12, 13]),
    (MeshConfig(data=2, zigzag=2), [0, 1, 2, 3, 12, 13, 14, 15]),
]


@pytest.mark.parametrize(("mesh", "first"), MESHES)
def test_whole_rows_are_those_that_were_arranged(mesh, first):
    x = jnp.arange(4 * 16).reshape(4, 16)
    with jax.set_mesh(make_mesh(mesh, jax.devices()[:4])):
        cut = jax.jit(arranged)(x)
        back = jax.jit(lambda x: whole(x, "BS"))(cut)
    np.testing.assert_array_equal(np.asarray(cut)[0, :8], first)
    np.testing.assert_array_equal(back, x)


def test_rows_are_cut_in_one_way():
    with pytest.raises(ConfigError, match="MeshConfig.zigzag = 4: expected 1 where MeshConfig.context = 2"):
        MeshConfig(context=2, zigzag=4)
