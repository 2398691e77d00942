"""The decode step at K3's full size for 16 TPU7x chips: one kernel per step, everything fits, no weight is copied."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import Mesh

from k3_jax.recipe import load_recipe
from k3_jax.serve.pack import BLOCKS, decode_config
from pallas_kernels.common import aot, tpu
from pallas_kernels.decode import AXIS, Plan, abstract_arguments, decode_program
from pallas_kernels.decode.ledger import Ledger

TOPOLOGY = "tpu7x:2x2x4"
STEPS = 16
EIGHT = dataclasses.replace(BLOCKS, banks=32, expert_slots=12)
CASES = {
    "batch_1": {"rows": 1, "capacity": 2048},
    "batch_8": {"rows": 8, "capacity": 2048, "blocks": EIGHT},
    "cut_cache": {"rows": 1, "capacity": 2**20, "cache_ranks": 32},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "batch_1")) for name in CASES])
def test_k3_on_16_chips(facts, name):
    plan = Plan(decode_config(load_recipe("configs/k3.py").model, ranks=32, **CASES[name]))
    mesh = Mesh(np.array(aot.topology(TOPOLOGY).devices), (AXIS,))
    lowered = aot.lower_for(decode_program(plan, mesh, STEPS), *abstract_arguments(plan, mesh), mesh=mesh)
    report = facts.check(f"decode_k3_{name}", lowered, TOPOLOGY)
    ledger = Ledger(plan)
    caches = sum(ledger.hbm[name] for name in plan.caches)
    assert report.custom_calls["tpu_custom_call"] == 1
    assert not report.collectives
    assert abs(report.argument_bytes / sum(ledger.hbm.values()) - 1) < 0.01
    assert report.alias_bytes >= 0.99 * caches
    # What is copied at the ends of a program of several steps are caches, each once; weights would be gigabytes.
    assert report.temp_bytes < 1.1 * caches + 8 * 2**20
    assert report.peak_bytes < tpu.TPU7X.program_hbm_bytes
