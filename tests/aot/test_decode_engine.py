"""The engine's program at K3's full size for 16 TPU7x chips: prompts, steps and sampling around the one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3_jax.recipe import load_recipe
from k3_jax.serve.megakernel import STEPS, Rows, steps_program
from k3_jax.serve.pack import BLOCKS
from k3_jax.serve.packed import Cut
from k3_jax.serve.sampling import Sampler
from pallas_kernels.common import aot, tpu
from pallas_kernels.decode import AXIS, abstract_arguments
from pallas_kernels.decode.ledger import Ledger

TOPOLOGY, RANKS = "tpu7x:2x2x4", 32


@pytest.mark.slow
def test_k3_generates_on_16_chips(facts):
    """One kernel, one gather of logits, no copy of a weight."""
    plan = Cut(load_recipe("configs/k3.py").model, RANKS, "bfloat16").plan(rows=1, capacity=2048)
    assert plan.config.blocks == BLOCKS
    mesh = Mesh(np.array(aot.topology(TOPOLOGY).devices), (AXIS,))
    weights, caches, token, position = abstract_arguments(plan, mesh)

    def alike(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    rows = Rows(caches, token, position, alike((1,), jnp.bool_), token)
    sampler = Sampler(*(alike((1,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.uint32)))
    arguments = (weights, rows, alike((STEPS + 1, 1), jnp.int32), sampler, alike((4,), jnp.int32))
    lowered = aot.lower_for(steps_program(plan, mesh, STEPS), *arguments, mesh=mesh)
    report = facts.check("decode_k3_engine", lowered, TOPOLOGY)
    ledger = Ledger(plan)
    caches = sum(ledger.hbm[name] for name in plan.caches)
    assert report.custom_calls["tpu_custom_call"] == 1
    assert report.alias_bytes >= 0.99 * caches
    assert report.temp_bytes < 1.1 * caches + 8 * 2**20
    assert report.peak_bytes < tpu.TPU7X.program_hbm_bytes
