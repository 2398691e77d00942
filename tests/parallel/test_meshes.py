"""The training step on meshes of 8 fake devices against one device: every axis, every pair of axes, some triples."""

import itertools
import math
import os
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import Keep, MeshConfig
from k3_jax.mesh import make_mesh
from tests.models import quick_jit, tiny_config
from tests.parallel.outcome import SEED, Outcome, assert_same, make, outcome, packed, routing_margin

# One layer of each mixer and of each FFN, in AttnRes blocks of one layer, with sizes that 8 devices divide.
CONFIG = tiny_config(
    num_layers=2,
    mla_layers=(1,),
    kda={"num_heads": 4},
    mla={"num_heads": 4, "q_lora_rank": 16},
    moe={"num_experts": 16},
    attn_res_block=1,
)
# Two micro-batches of 8 rows of 16.
BATCH = packed(CONFIG, (16, 13), 8, 16)
AXES = ("data", "fsdp", "pipe", "expert", "context", "tensor")
# These eight hold every axis and every pair of axes.
MESHES = [
    {"data": 2, "fsdp": 2, "pipe": 2},
    {"pipe": 2, "expert": 2, "context": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"expert": 2, "pipe": 2, "tensor": 2},
    {"fsdp": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "expert": 4},
    {"data": 2, "context": 4},
    {"data": 4, "tensor": 2},
]
ALONE = [{axis: 2} for axis in AXES] + [{axis: 8} for axis in ("data", "fsdp", "expert")] + [{"tensor": 4}]
PAIRS = [{a: 2, b: 2} for a, b in itertools.combinations(AXES, 2)]
TRIPLES = [
    {"pipe": 2, "context": 2, "tensor": 2},
    {"fsdp": 2, "pipe": 2, "expert": 2},
    {"fsdp": 2, "expert": 2, "context": 2},
    {"data": 2, "pipe": 2, "context": 2},
]
# Where rows are cut in the other way, everything else is as over context.
ZIGZAG = [
    {"zigzag": 2},
    {"data": 2, "zigzag": 2},
    {"expert": 2, "zigzag": 2, "tensor": 2},
    {"pipe": 2, "zigzag": 2, "tensor": 2},
]
slow = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ALONE + PAIRS + TRIPLES + ZIGZAG]
# Of 16 devices, which a process has that starts with them.
SIXTEEN = [{"data": 2, "pipe": 2, "expert": 2, "tensor": 2}, {"fsdp": 2, "pipe": 2, "context": 2, "tensor": 2}]
RUN = """
import pickle, sys
from tests.parallel.test_meshes import BATCH, CONFIG, SIXTEEN, MeshConfig, outcome
found = [outcome(CONFIG, MeshConfig(**sizes), BATCH) for sizes in SIXTEEN]
pickle.dump([tuple(x) for x in found], open(sys.argv[1], "wb"))
"""


@pytest.fixture(scope="module")
def one_device() -> Outcome:
    return outcome(CONFIG, MeshConfig(), BATCH)


def test_meshes_hold_every_pair_of_axes():
    pairs = {frozenset(pair) for mesh in MESHES for pair in itertools.combinations(mesh, 2)}
    assert pairs == {frozenset(pair) for pair in itertools.combinations(AXES, 2)}
    padding = np.mean(BATCH.segment_ids < 0)
    assert 0.3 < padding < 0.5


def test_routing_is_decided(monkeypatch):
    """Where it is not, rounding chooses another expert on another mesh, and gradients differ by whole rows."""
    assert routing_margin(monkeypatch, make(CONFIG, 1, SEED), BATCH) > 1e-3


@pytest.mark.parametrize("sizes", [*MESHES, *slow], ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_step_is_that_of_one_device(sizes, one_device):
    assert_same(outcome(CONFIG, MeshConfig(**sizes), BATCH), one_device)


@pytest.mark.slow
def test_sixteen_devices(root, tmp_path, one_device):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=16"}
    command = [sys.executable, "-c", RUN, str(tmp_path / "found")]
    subprocess.run(command, cwd=root, env=environment, check=True, timeout=900)
    for found in pickle.loads((tmp_path / "found").read_bytes()):
        assert_same(Outcome(*found), one_device)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "zigzag"])
def test_logits_are_in_the_order_of_the_tokens(axis):
    tokens, ids = BATCH.tokens[0], BATCH.segment_ids[0]
    run = quick_jit(lambda model, *rows: model(*rows, dtype=jnp.float32))
    found = []
    for mesh in (MeshConfig(), MeshConfig(**{"data": 2, axis: 2})):
        with jax.set_mesh(make_mesh(mesh, jax.devices()[: math.prod(mesh.axes().values())])):
            found.append(np.asarray(run(make(CONFIG, 1, SEED), jnp.asarray(tokens), jnp.asarray(ids))))
    np.testing.assert_allclose(found[1][ids >= 0], found[0][ids >= 0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"fsdp": 2, "tensor": 2}, "layer_input"),
        ({"data": 2, "pipe": 2}, "moe_output"),
        ({"expert": 2, "tensor": 2}, "moe_output"),
        ({"context": 2, "fsdp": 2}, "kda_qkv"),
        ({"pipe": 2, "expert": 2, "context": 2}, "kda_output"),
        ({"zigzag": 2, "expert": 2}, "mla_latent"),
    ],
    ids=str,
)
def test_whatever_is_kept_and_however_many_micro_batches(sizes, name, micro_batches, one_device):
    batch = jax.tree.map(lambda x: x.reshape(micro_batches, -1, x.shape[-1]), BATCH)
    assert_same(outcome(CONFIG, MeshConfig(**sizes), batch, activations=(Keep(name),)), one_device)


@pytest.mark.slow
def test_accumulation_leaves_counts_and_biases_bit_identical(one_device):
    """One micro-batch of 16 rows instead of two of 8."""
    whole = jax.tree.map(lambda x: x.reshape(1, -1, x.shape[-1]), BATCH)
    found = outcome(CONFIG, MeshConfig(), whole)
    assert_same(found, one_device)
    for layer, counts in one_device.counts.items():
        np.testing.assert_array_equal(found.counts[layer], counts)
    for name, bias in one_device.biases.items():
        np.testing.assert_array_equal(found.biases[name], bias)
