"""The training step on meshes of 8 fake devices against one device: every axis, every pair of axes, some triples."""

import itertools

import jax
import numpy as np
import pytest

from k3_jax.config import MeshConfig
from tests.models import tiny_config
from tests.parallel.outcome import Outcome, assert_same, outcome, packed

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
slow = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ALONE + PAIRS + TRIPLES]


@pytest.fixture(scope="module")
def one_device() -> Outcome:
    return outcome(CONFIG, MeshConfig(), BATCH)


def test_meshes_hold_every_pair_of_axes():
    pairs = {frozenset(pair) for mesh in MESHES for pair in itertools.combinations(mesh, 2)}
    assert pairs == {frozenset(pair) for pair in itertools.combinations(AXES, 2)}
    padding = np.mean(BATCH.segment_ids < 0)
    assert 0.3 < padding < 0.5


@pytest.mark.parametrize("sizes", [*MESHES, *slow], ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_step_is_that_of_one_device(sizes, one_device):
    assert_same(outcome(CONFIG, MeshConfig(**sizes), BATCH), one_device)


def test_accumulation_leaves_counts_and_biases_bit_identical(one_device):
    """One micro-batch of 16 rows instead of two of 8."""
    whole = jax.tree.map(lambda x: x.reshape(1, -1, x.shape[-1]), BATCH)
    found = outcome(CONFIG, MeshConfig(), whole)
    assert_same(found, one_device)
    for layer, counts in one_device.counts.items():
        np.testing.assert_array_equal(found.counts[layer], counts)
    for name, bias in one_device.biases.items():
        np.testing.assert_array_equal(found.biases[name], bias)
