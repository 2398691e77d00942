"""The budget of K3's decode step: bundles of every stage for 16 TPU7x chips, which may not rise unnoticed."""

import json

import pytest

from k3_jax.bench.decode_predicted import compile_step
from k3_jax.bench.decode_program import plan_of
from k3_jax.recipe import load_recipe
from pallas_kernels.decode.bench import stages

pytestmark = pytest.mark.aot_compile
TOPOLOGY, CONTEXT = "tpu7x:2x2x4", 1152
RISE = 1.05
REFRESH = "python -m pytest tests/aot/test_decode_schedule.py --aot refresh"


@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_no_stage_takes_more_bundles(facts, rows):
    plan = plan_of(load_recipe("configs/k3.py").model, 32, rows, CONTEXT)
    program = compile_step(plan, "configs/k3.py", TOPOLOGY, rows, CONTEXT)
    found = {stage["name"]: stage["bundles"] for stage in stages(plan, program.bundles)}
    path = facts.folder / f"decode_k3_bundles_{rows}.json"
    if facts.mode == "refresh":
        path.write_text(json.dumps(found, indent=2) + "\n")
    budget = json.loads(path.read_text())
    assert found.keys() == budget.keys()
    risen = {name: f"{budget[name]} -> {now}" for name, now in found.items() if now > RISE * budget[name]}
    assert not risen, f"more than 5 % above their budget; if that is wanted: {REFRESH}"
