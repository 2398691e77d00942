"""Serving on a mesh gives what one device gives."""

import jax
import jax.numpy as jnp
import pytest

from k3_jax.config import MeshConfig
from k3_jax.mesh import make_mesh
from k3_jax.nn.pretrained import load_model
from k3_jax.serve.decode import generate
from k3_jax.serve.sampling import SamplingConfig


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=2, tensor=2), pytest.param(MeshConfig(data=2, fsdp=2, tensor=2), marks=pytest.mark.slow)],
    ids=["data2-tensor2", "data2-fsdp2-tensor2"],
)
def test_rows_over_data_and_fsdp_and_heads_over_tensor(golden, expected, mesh):
    prompt = expected["greedy_prompt"][0].tolist()
    greedy, hot = SamplingConfig(), SamplingConfig(0.8, top_k=30, top_p=0.9, seed=4)
    devices = jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor]
    with jax.set_mesh(make_mesh(mesh, devices)):
        model = load_model(golden / "k3_tiny_c")
        rows = generate(
            model, [prompt] * 4, max_tokens=8, sampling=[greedy, hot, hot, greedy], chunk=16, dtype=jnp.float32
        )
    assert rows[0].tokens == rows[3].tokens == expected["greedy"].tolist()[:8]
    assert rows[1].tokens == rows[2].tokens != rows[0].tokens
