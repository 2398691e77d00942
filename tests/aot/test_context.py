"""Layers over 64 context ranks of TPU7x at K3's sizes, forward and backward: what is in their programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3_jax import sharding
from k3_jax.config import MeshConfig
from k3_jax.mesh import make_mesh
from k3_jax.nn.mla import MLA
from k3_jax.parallel.context import context_kda
from k3_jax.parallel.fragments import FRAGMENTS, Layout
from k3_jax.recipe import load_recipe
from pallas_kernels.common import aot
from pallas_kernels.common.hlo import read_hlo
from pallas_kernels.kda import chunk_kda

pytestmark = pytest.mark.aot_compile
TOPOLOGY, RANKS = "tpu7x:4x4x4", 64


def compiled(lowered: jax.stages.Lowered) -> str:
    with aot.no_disk_cache():
        return lowered.compile().as_text()


def lower_kda(axis: str, T: int, H: int = 96, K: int = 128) -> jax.stages.Lowered:
    """`T` tokens of one row on each rank."""
    mesh, layout = aot.mesh_for(TOPOLOGY, data=2, **{axis: RANKS}), Layout(axis, RANKS, FRAGMENTS[axis])

    def attend(q, k, v, g, beta, initial_state, segment_ids):
        options = {"initial_state": initial_state, "segment_ids": segment_ids, "gate_lower_bound": -5.0}
        return chunk_kda(q, k, v, g, beta, **options)

    tokens, states = P("data", axis), P("data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(*[tokens] * 5, states, tokens), out_specs=(tokens, states))
    def run(*operands):
        *rows, state, ids = operands
        o, after = context_kda(attend, *map(layout.split, rows), state, layout.split(ids), layout)
        return layout.join(o), after

    def step(do, dS, *operands):
        outputs, pullback = jax.vjp(lambda *floating: run(*floating, operands[-1]), *operands[:-1])
        return outputs, pullback((do, dS))

    row = lambda dtype, *shape: aot.abstract((2, T * RANKS, *shape), dtype, mesh, *tokens)  # noqa: E731
    q, g, beta = row(jnp.bfloat16, H, K), row(jnp.float32, H, K), row(jnp.float32, H)
    state = aot.abstract((2, H, K, K), jnp.float32, mesh, *states)
    return aot.lower_for(step, q, state, q, q, q, g, beta, state, row(jnp.int32), mesh=mesh)


def test_no_states_of_many_ranks():
    """A fragment's map is 12.6 MB; those of all would be 1.6 GB."""
    text = compiled(lower_kda("zigzag", T=512))
    largest = max(size for ops in read_hlo(text).values() for op in ops.values() for size, _ in op.arrays)
    print(f"largest array {largest / 1e6:.1f} MB; {aot.hlo_collectives(text)}")
    assert largest < 100e6


def lower_mla(mesh: MeshConfig, T: int) -> jax.stages.Lowered:
    """`T` tokens of one row on each rank."""
    config = load_recipe("configs/k3.py").model

    def on_mesh(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(jax.sharding.get_mesh(), spec))

    def step(layer, x, ids, dy):
        return jax.vjp(lambda layer, x: layer(x, ids)[0], layer, x)[1](dy)

    with jax.set_mesh(make_mesh(mesh, list(aot.topology(TOPOLOGY).devices))):
        layer = jax.eval_shape(lambda: MLA(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
        layer = jax.tree.map(lambda x: on_mesh(x, sharding.spec_of(x)), layer)
        x = on_mesh(jax.ShapeDtypeStruct((1, T * RANKS, config.hidden_size), jnp.bfloat16), sharding.active("BTD"))
        ids = on_mesh(jax.ShapeDtypeStruct(x.shape[:2], jnp.int32), sharding.active("BT"))
        return jax.jit(step).lower(layer, x, ids, x)


def test_mla_runs_the_kernels_and_sends_latents():
    """Two fragments of queries, forward and backward. Rows come whole as latents; their gradients leave as each rank's
    part, and only this is summed over tensor ranks."""
    T = 1024
    text = compiled(lower_mla(MeshConfig(zigzag=RANKS, tensor=2), T))
    assert aot.custom_call_targets(text)["tpu_custom_call"] == 4
    sent = [op for ops in read_hlo(text).values() for op in ops.values() if op.opcode.startswith(aot.COLLECTIVES)]
    whole = {(op.opcode, dims) for op in sent for dims in op.dims if T * RANKS in dims}
    assert whole == {("all-gather", (1, T * RANKS, 576)), ("all-gather", (1, T * RANKS))}
    assert ("reduce-scatter", (1, T, 576)) in {(op.opcode, dims) for op in sent for dims in op.dims}
