"""Routed experts at K3's sizes, forward and backward, for TPUs: rows and borrowed weights travel by ragged exchanges
over many ranks, rows are gathered over few, and no device ever has all experts or all ranks' rows."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from k3_jax.nn.linear import situ
from k3_jax.parallel.expert import FEW_RANKS, TPU_OPTIONS, routed_experts
from k3_jax.parallel.transport import CHUNKS
from pallas_kernels.common import aot

S, K, E, L, F = 8192, 16, 896, 3584, 3072  # eight ranks hold a quarter of the experts, or they would not fit
RANKS = {"v5p:4x4x4": 64, "v6e:8x16": 128, "tpu7x:4x4x4": 64, "tpu7x:2x2x1": 8}
ACTIVATION = functools.partial(situ, beta=4.0, linear_beta=25.0)


def lower(topology: str, ranks: int) -> jax.stages.Lowered:
    """On all devices: SparseCores move nothing in a program for a part of the topology."""
    groups = len(aot.topology(topology).devices) // ranks
    mesh, rows = aot.mesh_for(topology, data=groups, expert=ranks), ("data", "expert")
    tokens = S * ranks * groups
    arrays = [((tokens, L), jnp.bfloat16), ((tokens, K), jnp.float32), ((tokens, K), jnp.int32)]
    arguments = [aot.abstract(shape, dtype, mesh, rows) for shape, dtype in arrays]
    held = E // 4 if ranks == 8 else E
    shapes = (held, L, F), (held, L, F), (held, F, L)
    arguments += [aot.abstract(shape, jnp.bfloat16, mesh, "expert") for shape in shapes]
    run = jax.shard_map(
        functools.partial(routed_experts, activation=ACTIVATION, axis="expert"),
        mesh=mesh, in_specs=(P(rows),) * 3 + (P("expert"),) * 3, out_specs=P(rows),
    )  # fmt: skip

    @functools.partial(jax.jit, compiler_options=TPU_OPTIONS)
    def step(du, z, p, chosen, *weights):
        u, pullback = jax.vjp(lambda z, p, *weights: run(z, p, chosen, *weights), z, p, *weights)
        return u, pullback(du)

    return aot.lower_for(step, aot.abstract((tokens, L), jnp.float32, mesh, rows), *arguments, mesh=mesh)


@pytest.mark.parametrize("topology", RANKS)
def test_layer(facts, topology):
    ranks = RANKS[topology]
    name = f"experts_{topology.partition(':')[0]}_R{ranks}"
    report = facts.check(name, lower(topology, ranks), topology)
    exchanges = report.collectives["ragged-all-to-all"]
    if ranks > FEW_RANKS:
        # By chunks, rows there and back, forward and backward (z and du together); three weights fetched, their
        # gradients given back; p twice, its gradient once.
        assert exchanges == 4 * CHUNKS + 3 + 3 + 2 + 1
    else:
        assert exchanges == 3 + 3
    rows, weights = S * K * (L + F) * 4, 3 * 2 * min(E // ranks, 28) * L * F * 4  # of one rank, in float32
    assert report.peak_bytes < 2.8 * (rows + weights)
