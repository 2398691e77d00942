"""The whole training step of the tiny recipe, compiled for three TPU generations: it lowers, fits, and communicates as
the sharding table says. The programs use the XLA form of KDA; full-size programs come with the kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax import sharding
from k3_jax.config import MeshConfig, RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.recipe import load_recipe
from k3_jax.train.packing import Batch
from k3_jax.train.state import new_model, start
from k3_jax.train.step import make_train_step
from pallas_kernels.common import aot, tpu


def lower_step(run: RunConfig, topology: str) -> jax.stages.Lowered:
    mesh = make_mesh(run.mesh, list(aot.topology(topology).devices))

    def on_mesh(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, sharding.spec_of(x)))

    with jax.set_mesh(mesh):
        state = jax.tree.map(on_mesh, jax.eval_shape(lambda: start(run, new_model(run))))
        rows = (run.train.grad_accumulation, run.data.batch_size // run.train.grad_accumulation)
        layout = NamedSharding(mesh, PartitionSpec(None, *sharding.active("BT")))
        field = lambda dtype: jax.ShapeDtypeStruct((*rows, run.data.sequence_length), dtype, sharding=layout)  # noqa: E731
        batch = Batch(field(jnp.int32), field(jnp.int32), field(jnp.bool_))
        return make_train_step(run).trace(state, batch).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_tiny_train_step(facts, topology):
    run = load_recipe("configs/tiny.py")
    train = dataclasses.replace(run.train, compute_dtype="bfloat16", grad_accumulation=2)
    run = dataclasses.replace(run, train=train, mesh=MeshConfig(fsdp=4, tensor=2))
    report = facts.check(f"tiny_step_{topology.partition(':')[0]}", lower_step(run, topology), topology)
    assert report.peak_bytes < tpu.chip(topology).hbm_bytes
    assert {"all-gather", "all-to-all"} <= set(report.collectives)  # weights over fsdp; Muon's blocks to their owners


def test_full_size_step_lowers_for_a_pod():
    """2.78T parameters on 4,096 TPU7x cores: shapes, divisibility and sharding of every tensor of the step.

    It is not compiled: without expert parallelism a layer's experts are gathered whole, which no chip holds.
    """
    text = lower_step(load_recipe("configs/k3.py"), "tpu7x:8x16x16").as_text()
    assert len(text) < 20e6  # one body per layer kind, not 93 layers
