"""A weight in use, on a mesh of fsdp and expert: gathered over one axis after the other, its gradient scattered while
it is summed. Nothing is all-reduced."""

import jax
import jax.numpy as jnp

from k3_jax import sharding
from k3_jax.config import MeshConfig
from k3_jax.mesh import make_mesh
from pallas_kernels.common import aot

TOPOLOGY = "tpu7x:2x2x1"
D, F, TOKENS = 4096, 8192, 2048


def loss(weight, x):
    used = sharding.use(weight, "DF", x.dtype, "BTF")
    return jnp.square(sharding.einsum("btd,df->btf", x, used, out="BTF").astype(jnp.float32)).sum()


def test_gradients_are_scattered(facts):
    mesh = make_mesh(MeshConfig(fsdp=4, expert=2), list(aot.topology(TOPOLOGY).devices))
    with jax.set_mesh(mesh):
        specs = sharding.stored("DF"), sharding.active("BTD")
    weight = aot.abstract((D, F), jnp.float32, mesh, *specs[0])
    x = aot.abstract((8, TOKENS, D), jnp.bfloat16, mesh, *specs[1])
    report = facts.check("weight_in_use_tpu7x", aot.lower_for(jax.grad(loss), weight, x, mesh=mesh), TOPOLOGY)
    assert report.collectives == {"all-gather": 2, "reduce-scatter": 2}
