"""Sharding: the table of letters, and where the model's tensors lie."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax import sharding
from k3_jax.config import ConfigError, MeshConfig
from k3_jax.mesh import make_mesh
from k3_jax.nn.grouping import Depth
from k3_jax.nn.layout import abstract_layers
from tests.models import abstract_model, tiny_config

# One layer of each mixer and of each FFN, with sizes that 8 devices divide.
CONFIG = tiny_config(
    num_layers=2,
    mla_layers=(1,),
    kda={"num_heads": 4},
    mla={"num_heads": 4, "q_lora_rank": 16},
    moe={"num_experts": 16},
    attn_res_block=2,
)
MESH = MeshConfig(data=2, fsdp=2, tensor=2)
# Axes of one layer's tensor; "-" is not sharded.
TABLE = {
    "embed": "tensor fsdp", "lm_head": "fsdp tensor", "norm": "-", "output_attn_res.query": "-",
    "layers.0.attn_res.query": "-", "layers.0.ffn_norm": "-",
    "layers.0.kda.q": "fsdp tensor -", "layers.0.kda.g": "fsdp tensor -", "layers.0.kda.o": "tensor - fsdp",
    "layers.0.kda.q_conv": "- tensor -", "layers.0.kda.A_log": "tensor", "layers.0.kda.dt_bias": "tensor -",
    "layers.0.kda.b": "fsdp tensor", "layers.0.kda.f_a": "fsdp -", "layers.0.kda.f_b": "- tensor -",
    "layers.0.kda.o_norm": "-",
    "layers.0.dense.gate": "fsdp tensor", "layers.0.dense.down": "tensor fsdp",
    "layers.1.mla.q_a": "fsdp -", "layers.1.mla.q_b": "fsdp tensor -", "layers.1.mla.kv_a": "fsdp -",
    "layers.1.mla.kv_b": "fsdp tensor -", "layers.1.mla.g": "fsdp tensor -", "layers.1.mla.o": "tensor - fsdp",
    "layers.1.moe.router": "fsdp -", "layers.1.moe.router_bias": "-", "layers.1.moe.latent_down": "fsdp -",
    "layers.1.moe.latent_up": "- fsdp", "layers.1.moe.w1": "expert fsdp tensor",
    "layers.1.moe.w3": "expert fsdp tensor", "layers.1.moe.w2": "expert tensor fsdp",
    "layers.1.moe.shared.gate": "fsdp tensor", "layers.1.moe.shared.down": "tensor fsdp",
}  # fmt: skip


def test_parameters_are_sharded_by_the_table():
    with jax.set_mesh(make_mesh(MESH)):
        layers = abstract_layers(abstract_model(CONFIG), Depth(CONFIG))
        for name, axes in TABLE.items():
            spec = PartitionSpec(*(None if axis == "-" else axis for axis in axes.split()))
            wanted = NamedSharding(layers[name].sharding.mesh, spec)
            assert wanted.is_equivalent_to(layers[name].sharding, layers[name].ndim), (name, layers[name].sharding.spec)


def test_every_matrix_is_sharded():
    """Nothing big is left whole on each device: only vectors, and the router's bias, have no axis."""
    with jax.set_mesh(make_mesh(MESH)):
        for name, x in abstract_layers(abstract_model(CONFIG), Depth(CONFIG)).items():
            assert x.ndim == 1 or any(x.sharding.spec), name


def test_letters():
    assert sharding.stored("DHK") == PartitionSpec(("fsdp", "expert"), "tensor", None)
    assert sharding.active("DHK") == PartitionSpec(None, "tensor", None)
    assert sharding.active("BTD") == PartitionSpec(("data", "fsdp", "expert"), None, None)
    with pytest.raises(ConfigError, match="used twice"):
        sharding.stored("HF")


def test_without_a_mesh_everything_is_local():
    x = jnp.ones((2, 3))
    assert not sharding.has_mesh()
    assert sharding.place(x, sharding.active("BT")) is x
    assert sharding.sum_over("BT", x) is x and sharding.max_over("BT", x) is x
    assert sharding.local(np.add, ("BT", "BT"), "BT") is np.add


COMPILE = """
import jax
from k3_jax.plan.step import lower_train_step
from tests.models import run_of
from tests.unit.test_sharding import CONFIG, MESH
lower_train_step(run_of(CONFIG, MESH), jax.devices(), "cpu").compile()
"""


@pytest.mark.slow
def test_nothing_is_rematerialized_on_all_devices(root):
    """XLA warns in its log where it can only gather a whole array to lay it out anew. A process of its own: the log
    level must stand before JAX starts, and a program from the compilation cache would warn of nothing."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "0", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Involuntary full rematerialization" not in result.stderr
