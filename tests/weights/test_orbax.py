"""Reading an Orbax checkpoint is strict where the library is lenient, and does not depend on the mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax.config import ConfigError, MeshConfig
from k3_jax.mesh import make_mesh
from k3_jax.weights.orbax import read_arrays


def targets(mesh, **changes):
    shapes = {"a": ((8, 4), jnp.float32, PartitionSpec("fsdp", "tensor")), "b": ((8,), jnp.bfloat16, PartitionSpec())}
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for name, (shape, dtype, spec) in (shapes | changes).items()
    }


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig(fsdp=4, tensor=2))


@pytest.fixture
def saved(mesh, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {name: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding)
              for name, x in targets(mesh).items()}  # fmt: skip
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", arrays)
    return tmp_path / "model", arrays


@pytest.mark.parametrize("fsdp,tensor", [(4, 2), (2, 2), (1, 1)])
def test_arrays_have_the_same_bits_on_another_mesh(saved, fsdp, tensor):
    path, arrays = saved
    wanted = targets(make_mesh(MeshConfig(fsdp=fsdp, tensor=tensor), jax.devices()[: fsdp * tensor]))
    restored = read_arrays(path, wanted)
    for name, x in arrays.items():
        assert restored[name].dtype == x.dtype and restored[name].sharding == wanted[name].sharding
        np.testing.assert_array_equal(np.asarray(restored[name]), np.asarray(x))


REPLICATED = PartitionSpec()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"a": ((8, 4), jnp.bfloat16, REPLICATED)}, r"a is .*float32.*expected .*bfloat16"),
        ({"b": ((8,), jnp.float32, REPLICATED)}, r"b is .*bfloat16.*expected .*float32"),
        ({"a": ((4, 8), jnp.float32, REPLICATED)}, r"a is \(\(8, 4\).*expected \(\(4, 8\)"),
        ({"c": ((1,), jnp.float32, REPLICATED)}, r"missing \['c'\]"),
    ],
)
def test_another_dtype_shape_or_name_is_an_error(saved, mesh, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_arrays(saved[0], targets(mesh, **changes))


def test_an_array_too_many_is_an_error(saved, mesh):
    wanted = targets(mesh)
    del wanted["b"]
    with pytest.raises(ConfigError, match=r"unexpected \['b'\]"):
        read_arrays(saved[0], wanted)
