"""Building a model from a checkpoint directory: Orbax, or the released Hugging Face layout."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from k3_jax import sharding
from k3_jax.config import ConfigError, K3Config, RunConfig
from k3_jax.nn.layout import abstract_layers, from_layers
from k3_jax.nn.transformer import K3
from k3_jax.overrides import from_json
from k3_jax.weights.orbax import MODEL, find_step, read_arrays, read_run, saved_dtypes
from k3_jax.weights.released import is_released, load_released, read_config


def load_config(directory: str | Path) -> K3Config:
    """The architecture of a checkpoint. Raises ConfigError if `directory` is neither kind of checkpoint."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(f"checkpoint {directory}: no such directory")
    if is_released(directory):
        return read_config(directory)
    step = find_step(directory)
    if step is None:
        raise ConfigError(f"checkpoint {directory}: neither an Orbax checkpoint nor a folder with config.json")
    return from_json(RunConfig, read_run(step)["config"]).model


def load_model(directory: str | Path, dtype: DTypeLike | None = None, interleave: int = 1) -> K3:
    """The model in `directory`, on the mesh that is set (or one device).

    dtype: of all tensors that are not float32 by nature (None: as stored; packed experts become bfloat16).
    """
    directory, config = Path(directory), load_config(directory)
    # nnx.Rngs(0) is not drawn from: eval_shape only asks for shapes, dtypes and shardings.
    abstract = jax.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0), dtype=dtype or jnp.float32, interleave=interleave))
    wanted = abstract_layers(abstract, abstract.depth)
    if is_released(directory):
        named = {name: _placed(array, wanted[name], dtype) for name, array in load_released(directory, config)}
    else:
        step = find_step(directory)
        stored = saved_dtypes(step / MODEL)
        targets = {name: _target(x, stored.get(name, x.dtype)) for name, x in wanted.items()}
        named = {name: _placed(x, wanted[name], dtype) for name, x in read_arrays(step / MODEL, targets).items()}
    return from_layers(named, abstract, abstract.depth)


def _target(x: jax.ShapeDtypeStruct, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=_sharding(x))


def _sharding(x: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    if sharding.has_mesh():
        return jax.sharding.NamedSharding(jax.sharding.get_mesh(), x.sharding.spec)
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _placed(array: np.ndarray | jax.Array, wanted: jax.ShapeDtypeStruct, dtype) -> jax.Array:
    """On its shard, widened or rounded to `dtype` where that is asked for; float32 tensors stay float32."""
    if dtype is not None:
        array = array.astype(wanted.dtype)
    return jax.device_put(array, _sharding(wanted))
