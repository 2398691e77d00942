"""The real training step of a run, traced and lowered without a number in memory."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax import sharding
from k3_jax.config import RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.train.packing import Batch
from k3_jax.train.setup import check_run
from k3_jax.train.state import new_model, start
from k3_jax.train.step import make_train_step


def lower_train_step(run: RunConfig, devices: list[jax.Device], platform: str) -> jax.stages.Lowered:
    """The whole training step on a mesh of these devices, which may be those of a topology.

    Raises ConfigError for what does not divide.
    """
    mesh = make_mesh(run.mesh, devices)
    check_run(run, mesh, init=None)

    def on_mesh(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, sharding.spec_of(x)))

    with jax.set_mesh(mesh):
        state = jax.tree.map(on_mesh, jax.eval_shape(lambda: start(run, new_model(run))))
        micro = run.train.grad_accumulation
        shape = (micro, run.data.batch_size // micro, run.data.sequence_length)
        layout = NamedSharding(mesh, PartitionSpec(None, *sharding.active("BT")))
        batch = Batch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=layout) for dtype in (jnp.int32, jnp.int32, bool)))
        return make_train_step(run).trace(state, batch).lower(lowering_platforms=(platform,))
