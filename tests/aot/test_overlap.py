"""The MoE layer of K3 at its real mesh: most bytes of its expert transport travel under matrix products."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from k3_jax import sharding
from k3_jax.config import MeshConfig
from k3_jax.mesh import make_mesh
from k3_jax.nn.moe import LatentMoE
from k3_jax.parallel.expert import TPU_OPTIONS
from k3_jax.recipe import load_recipe
from pallas_kernels.common import aot, tpu
from pallas_kernels.common.overlap import Transfer, replay

pytestmark = pytest.mark.aot_compile
TOPOLOGY, RANKS, TOKENS = "tpu7x:4x4x4", 64, 8192
# Uncalibrated: per TPU7x core, all-to-all over 32 chips with six links of 100 GB/s each way, 2.5 hops on average.
LINK_BANDWIDTH = 120e9


def forward(layer, x, ids):
    return layer(x, ids)[0]


def backward(layer, x, ids, dy):
    return jax.vjp(lambda layer, x: layer(x, ids)[0], layer, x)[1](dy)


def lower(step):
    config, devices = load_recipe("configs/k3.py").model, list(aot.topology(TOPOLOGY).devices)
    mesh = make_mesh(MeshConfig(fsdp=len(devices) // RANKS, expert=RANKS), devices)

    def on_mesh(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, sharding.spec_of(x)))

    def batch(*shape, dtype=jnp.bfloat16):
        layout = NamedSharding(mesh, sharding.active("BTD"[: len(shape)]))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)

    with jax.set_mesh(mesh):
        layer = jax.eval_shape(lambda: LatentMoE(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
        rows = (len(devices), TOKENS)
        arguments = [jax.tree.map(on_mesh, layer), batch(*rows, config.hidden_size), batch(*rows, dtype=jnp.int32)]
        arguments += [arguments[1]] if step is backward else []
        return jax.jit(step, compiler_options=TPU_OPTIONS).lower(*arguments)


def sent(op) -> float:
    """Bytes of an exchange: its rows; p without the lanes that pad it; one borrowed expert of those at home."""
    if not op.name.startswith("ragged-all-to-all"):
        return 0
    size, dims = min((size, dims) for (size, _), dims in zip(op.arrays, op.dims, strict=True) if len(dims) == 3)
    if dims[0] == 896 // RANKS:
        return size / dims[0]
    return size / dims[-1] if dims[-2:] == (1, 128) else size


@pytest.mark.parametrize("step", [forward, backward])
def test_transport_travels_under_products(step):
    with aot.no_disk_cache():
        text = lower(step).compile().as_text()
    cost = lambda op, *_: Transfer(float(sent(op)), sent(op) / LINK_BANDWIDTH, op.name)  # noqa: E731
    found = replay(text, tpu.chip(TOPOLOGY), cost)
    work, transfer, exposed = (1e3 * seconds for seconds in (found.compute, found.transfer, found.exposed))
    print(f"{step.__name__}: {found.sent / 1e6:.0f} MB sent, {100 * found.covered_share:.0f} % under products")
    print(f"predicted: {work:.1f} ms of work, {transfer:.1f} ms of transfers, {exposed:.1f} ms of them exposed")
    shares = found.utilisation(tpu.chip(TOPOLOGY)).items()
    print("share of the peak by overlap: " + ", ".join(f"{name} {100 * x:.0f} %" for name, x in shares))
    assert found.covered_share >= 0.7
    assert found.hidden_share > 0.3
