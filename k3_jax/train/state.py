"""What training carries from step to step."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from k3_jax.config import RunConfig
from k3_jax.nn.layout import leaf_names
from k3_jax.nn.transformer import K3
from k3_jax.train.optimizer import make_optimizer


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "updates", "bad_in_row", "model", "optimizer"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """float32 parameters and optimizer state, sharded alike. Nothing in a step is random: the seed makes the
    initial parameters and the order of the data. The router's histograms are zero between steps."""

    step: Int[Array, ""]  # batches consumed
    updates: Int[Array, ""]  # steps that were not skipped
    bad_in_row: Int[Array, ""]  # skipped steps since the last good one
    model: K3
    optimizer: Any


def optimizer_for(run: RunConfig, model: K3) -> optax.GradientTransformation:
    dtype = jnp.dtype(run.train.compute_dtype)
    return make_optimizer(run.optimizer, leaf_names(model), run.train.steps, model=run.model, ns_dtype=dtype)


def new_model(run: RunConfig) -> K3:
    return K3(run.model, rngs=nnx.Rngs(run.train.seed), interleave=run.mesh.interleave)


def start(run: RunConfig, model: K3) -> TrainState:
    """A fresh state around a model: step 0 and an empty optimizer."""
    counters = [jnp.zeros((), jnp.int32) for _ in range(3)]  # not one array: the step donates each
    return TrainState(*counters, model, optimizer_for(run, model).init(model))
