"""The KDA kernels at K3's shape for three TPU generations: VMEM suffices, and nothing big surrounds the calls."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.common import aot
from pallas_kernels.kda import chunk_kda, recurrent_kda

T, K = 8192, 128
# Tracing 32 heads takes seconds: `make test` checks the facts of a tensor-parallel share only.
HEADS = [pytest.param(96, marks=pytest.mark.slow), 12]
TOPOLOGIES = ["v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"]


def flat_kda(heads, bound, q, k, v, g, beta):
    q, k, v, g = (x.reshape(*x.shape[:2], heads, K) for x in (q, k, v, g))
    o, S = chunk_kda(q, k, v, g, beta, gate_lower_bound=bound, implementation="pallas")
    return o.reshape(*o.shape[:2], -1), S


def forward_backward(heads, bound, do, *arrays):
    (o, S), pullback = jax.vjp(functools.partial(flat_kda, heads, bound), *arrays)
    return o, S, pullback((do, jnp.zeros_like(S)))


def arguments(topology, heads, length=T):
    mesh = aot.mesh_for(topology, x=1)
    rows = lambda dtype: aot.abstract((1, length, heads * K), dtype, mesh)  # noqa: E731
    q = rows(jnp.bfloat16)
    return mesh, (q, q, q, rows(jnp.float32), aot.abstract((1, length, heads), jnp.float32, mesh))


def name(part, topology, heads):
    return f"kda_{part}_H{heads}_{topology.partition(':')[0]}"


def check(report, calls, heads):
    """The calls, and not a byte beside them: no chunk's [C, C, K], no copy of an input or of the states."""
    assert report.custom_calls["tpu_custom_call"] == calls
    assert report.temp_bytes < 1.1 * saved_bytes(heads) * (calls - 1) + 2**24


def saved_bytes(heads):
    """Of the backward pass: a state and an inverse per chunk, in bfloat16."""
    return heads * (T // 64) * (K * K + 64 * 64) * 2 * 2  # 64 lanes are stored as 128


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_forward(facts, topology, heads):
    mesh, arrays = arguments(topology, heads)
    lowered = aot.lower_for(functools.partial(flat_kda, heads, -5.0), *arrays, mesh=mesh)
    check(facts.check(name("forward", topology, heads), lowered, topology), 1, heads)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_forward_and_backward(facts, topology, heads):
    mesh, arrays = arguments(topology, heads)
    lowered = aot.lower_for(functools.partial(forward_backward, heads, -5.0), arrays[0], *arrays, mesh=mesh)
    check(facts.check(name("backward", topology, heads), lowered, topology), 2, heads)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_unbounded_gate(facts, topology):
    mesh, arrays = arguments(topology, 12)
    lowered = aot.lower_for(functools.partial(forward_backward, 12, None), arrays[0], *arrays, mesh=mesh)
    check(facts.check(name("unbounded", topology, 12), lowered, topology), 2, 12)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_decode(facts, topology):
    """Four tokens of eight sequences: a donated state is updated where it is."""
    mesh = aot.mesh_for(topology, x=1)
    of = lambda dtype, *shape: aot.abstract(shape, dtype, mesh)  # noqa: E731
    q, g, beta = of(jnp.bfloat16, 8, 4, 96, K), of(jnp.float32, 8, 4, 96, K), of(jnp.float32, 8, 4, 96)
    state, ids = of(jnp.float32, 8, 96, K, K), of(jnp.int32, 8, 4)

    def step(state, q, k, v, g, beta, ids):
        return recurrent_kda(q, k, v, g, beta, initial_state=state, segment_ids=ids, implementation="pallas")

    lowered = aot.lower_for(jax.jit(step, donate_argnums=0), state, q, q, q, g, beta, ids, mesh=mesh)
    report = facts.check(f"kda_decode_H96_{topology.partition(':')[0]}", lowered, topology)
    assert report.custom_calls["tpu_custom_call"] == 1
    assert report.alias_bytes == state.size * 4
    assert report.temp_bytes < state.size


@pytest.mark.aot_compile
@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.vmap], ids=["checkpoint", "vmap"])
def test_under_transformations(wrap):
    """What the interpreter cannot run: the gradient under checkpoint, and rows batched by vmap."""
    mesh, arrays = arguments("tpu7x:2x2x1", 2, 256)
    one = functools.partial(flat_kda, 2, -5.0)

    def loss(*arrays):
        if wrap is jax.vmap:
            arrays = [x[:, None] for x in arrays]
        return wrap(one)(*arrays)[0].astype(jnp.float32).sum()

    report = aot.compile_for(jax.grad(loss, argnums=range(5)), *arrays, mesh=mesh)
    assert report.custom_calls["tpu_custom_call"] >= 2
