"""Routed experts at K3's sizes, forward and backward, for TPUs: rows and borrowed weights travel by ragged exchanges
over many ranks, rows are gathered over few, and no device ever has all experts or all ranks' rows."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from k3_jax.nn.linear import situ
from k3_jax.parallel.expert import routed_experts
from pallas_kernels.common import aot

S, K, E, L, F = 8192, 16, 896, 3584, 3072
RANKS = {"v5p:4x4x4": 64, "v6e:16x16": 128, "tpu7x:4x4x4": 64, "tpu7x:2x2x2": 16}
ACTIVATION = functools.partial(situ, beta=4.0, linear_beta=25.0)


def lower(topology: str, ranks: int) -> jax.stages.Lowered:
    mesh = aot.mesh_for(topology, expert=ranks)
    shapes = [((S * ranks, L), jnp.bfloat16), ((S * ranks, K), jnp.float32), ((S * ranks, K), jnp.int32)]
    shapes += [(shape, jnp.bfloat16) for shape in ((E, L, F), (E, L, F), (E, F, L))]
    arguments = [aot.abstract(shape, dtype, mesh, "expert") for shape, dtype in shapes]
    run = jax.shard_map(
        functools.partial(routed_experts, activation=ACTIVATION, axis="expert"),
        mesh=mesh, in_specs=(P("expert"),) * 6, out_specs=P("expert"),
    )  # fmt: skip

    def step(du, z, p, chosen, *weights):
        u, pullback = jax.vjp(lambda z, p, *weights: run(z, p, chosen, *weights), z, p, *weights)
        return u, pullback(du)

    du = aot.abstract((S * ranks, L), jnp.float32, mesh, "expert")
    return aot.lower_for(step, du, *arguments, mesh=mesh)


@pytest.mark.parametrize("topology", RANKS)
def test_layer(facts, topology):
    ranks = RANKS[topology]
    name = f"experts_{topology.partition(':')[0]}_R{ranks}"
    report = facts.check(name, lower(topology, ranks), topology)
    exchanges = report.collectives["ragged-all-to-all"]
    if ranks > 16:
        # Weights: three fetched for both directions, three gradients given back; rows there (z twice, du) and back (u,
        # dz); the rows' weights twice, and their gradients back.
        assert exchanges == 3 + 3 + 3 + 2 + 2 + 1
        # The counts, and how many turns the gradients take.
        assert report.collectives.get("all-gather", 0) + report.collectives["all-reduce"] == 2
    else:
        assert exchanges == 3 + 3
    rows, weights = S * K * (L + F) * 4, 3 * 2 * (E // ranks) * L * F * 4  # of one rank, in float32
    assert report.peak_bytes < 2.5 * (rows + weights)
