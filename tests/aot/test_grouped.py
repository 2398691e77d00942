"""The grouped products at K3's sizes for three TPU generations: VMEM suffices, and operands are used as they lie."""

import jax.numpy as jnp
import pytest

from pallas_kernels.common import aot
from pallas_kernels.grouped import grouped_matmul, grouped_outer, grouped_transposed

N, CHUNK, G, L, F = 131072, 32768, 28, 3584, 3072
SHAPES = {"matmul": ((CHUNK, L), (G, L, F)), "transposed": ((CHUNK, F), (G, L, F)), "outer": ((N, L), (N, F))}
PRODUCTS = {"matmul": grouped_matmul, "transposed": grouped_transposed, "outer": grouped_outer}


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_product(facts, product, topology):
    mesh = aot.mesh_for(topology, x=1)
    arguments = [aot.abstract(shape, jnp.bfloat16, mesh) for shape in SHAPES[product]]
    lowered = aot.lower_for(PRODUCTS[product], *arguments, aot.abstract((G,), jnp.int32, mesh), mesh=mesh)
    report = facts.check(f"grouped_{product}_{topology.partition(':')[0]}", lowered, topology)
    assert report.custom_calls["tpu_custom_call"] == 1
    assert report.temp_bytes < 2**20  # no copy of an operand
