"""Pipelines of 2, 4 and 8 stages against one device: gradients, evaluation, and memory."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax import sharding
from k3_jax.config import MeshConfig
from k3_jax.mesh import make_mesh
from k3_jax.train.packing import Batch
from k3_jax.train.step import accumulate, make_eval_step, micro_batches
from tests.models import quick_jit, run_of, tiny_config
from tests.parallel.outcome import assert_same, make, outcome, packed

# Eight AttnRes blocks: layers of three kinds, in blocks of one.
EIGHT = tiny_config(num_layers=8, mla_layers=(3, 7), attn_res_block=1)
# Blocks of two and a short last one; kinds that do not line up with the blocks.
UNEVEN = tiny_config(num_layers=7, mla_layers=(1, 4, 6), attn_res_block=2)
# One kind of layer: little to compile.
ALIKE = tiny_config(num_layers=4, mla_layers=(), first_dense_layers=4, moe=None, attn_res_block=1)
LENGTHS = (32, 48, 32, 64)


CASES = {
    "alike_2x2": (ALIKE, MeshConfig(pipe=2, interleave=2)),
    "eight_2": (EIGHT, MeshConfig(pipe=2)),
    "eight_4": (EIGHT, MeshConfig(pipe=4)),
    "eight_8": (EIGHT, MeshConfig(pipe=8)),
    "eight_4x2": (EIGHT, MeshConfig(pipe=4, interleave=2)),
    "eight_2x4": (EIGHT, MeshConfig(pipe=2, interleave=4)),
    "eight_3x2": (EIGHT, MeshConfig(pipe=3, interleave=2)),
    "uneven_3": (UNEVEN, MeshConfig(pipe=3)),
    "uneven_2x2": (UNEVEN, MeshConfig(pipe=2, interleave=2)),
    "uneven_4": (UNEVEN, MeshConfig(pipe=4)),
}
QUICK = "alike_2x2"


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in CASES]
)
def test_micro_batches_of_any_length_give_the_gradients_of_one_device(case):
    config, mesh = CASES[case]
    batch = packed(config, LENGTHS, 2, 64)
    assert_same(outcome(config, mesh, batch), outcome(config, MeshConfig(), batch))


@pytest.mark.slow
def test_evaluation_is_that_of_one_device():
    batch = packed(UNEVEN, (16,) * 4, 4, 16)
    rows = Batch(*(x.reshape(-1, x.shape[-1]) for x in batch))
    found = []
    for mesh in (MeshConfig(), MeshConfig(pipe=2, interleave=2, fsdp=2)):
        run = run_of(UNEVEN, mesh)
        with jax.set_mesh(make_mesh(mesh, jax.devices()[: mesh.pipe * mesh.fsdp])):
            model = make(UNEVEN, mesh.interleave, 5)
            layout = NamedSharding(jax.sharding.get_mesh(), sharding.active("BT"))
            found.append([float(x) for x in make_eval_step(run)(model, jax.device_put(rows, layout))])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_micro_batches():
    """What a rank keeps is bounded by the schedule; the batch itself is an argument."""

    def temporaries(micro: int) -> int:
        mesh = MeshConfig(pipe=2)
        run = run_of(UNEVEN, mesh)
        with jax.set_mesh(make_mesh(mesh, jax.devices()[:2])):
            model = make(UNEVEN, 1, 5)
            batch = micro_batches(Batch(*(x[0] for x in packed(UNEVEN, (64,), 4 * micro, 64))), micro)
            batch = jax.device_put(batch, NamedSharding(jax.sharding.get_mesh(), PartitionSpec()))
            step = quick_jit(lambda model, batch: accumulate(run, model, batch)[:2])
            return step.lower(model, batch).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(4), temporaries(32)
    numbers_of_tokens = 28 * 4 * 64 * 3 * jnp.dtype(jnp.int32).itemsize
    assert many < few + 2 * numbers_of_tokens
