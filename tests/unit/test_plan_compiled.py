"""`k3 plan --compile` after the compilation: what a schedule exposes, by kind and axes, and its MFU."""

import dataclasses

import pytest
from rich.console import Console

from k3_jax.config import MeshConfig
from k3_jax.plan import training
from k3_jax.plan.compiled import CompiledStep, cost_of
from k3_jax.plan.pod import pod
from pallas_kernels.common import traffic
from pallas_kernels.common.overlap import replay
from tests.models import run_of, tiny_config

MESH, TOPOLOGY = MeshConfig(fsdp=4, expert=2), "v6e:2x4"
# A gather over fsdp under a product, one over experts that is waited for, and a sum over both that has no start.
TEXT = """\
HloModule m, is_scheduled=true

%fused (p0: bf16[512,512], p1: bf16[512,512]) -> bf16[512,512] {
  %p0 = bf16[512,512]{1,0} parameter(0)
  %p1 = bf16[512,512]{1,0} parameter(1)
  ROOT %convolution.1 = bf16[512,512]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

ENTRY %main (a: bf16[128,512], b: bf16[512,512]) -> bf16[512,512] {
  %a = bf16[128,512]{1,0} parameter(0)
  %b = bf16[512,512]{1,0} parameter(1)
  %all-gather-start = (bf16[128,512]{1,0}, bf16[512,512]{1,0}) all-gather-start(%a), replica_groups={{0,2,4,6}}
  %fusion.1 = bf16[512,512]{1,0} fusion(%b, %b), kind=kOutput, calls=%fused
  %all-gather-done = bf16[512,512]{1,0} all-gather-done(%all-gather-start)
  %all-gather-start.1 = (bf16[128,512]{1,0}, bf16[256,512]{1,0}) all-gather-start(%a), replica_groups={{0,1}}
  %all-gather-done.1 = bf16[256,512]{1,0} all-gather-done(%all-gather-start.1)
  ROOT %all-reduce.1 = bf16[512,512]{1,0} all-reduce(%fusion.1), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
"""
WHOLE = 512 * 512 * 2


@pytest.fixture(scope="module")
def plan():
    place, run = pod(TOPOLOGY), run_of(tiny_config(), MESH)
    mesh = dict(place.mesh(MESH).shape)
    schedule = replay(TEXT, place.chip, cost_of(place, mesh))
    step = CompiledStep(10, 20, 0, 1.0, 60.0, 10**9, traffic.collectives(TEXT, mesh), schedule)
    return dataclasses.replace(training.plan_training(run, TOPOLOGY, lowered=False, effort=None), compiled=step)


def test_exposed_bytes_by_kind_and_axes(plan):
    assert plan.compiled.sent()["all-gather", ("fsdp",)] == WHOLE * 3 // 4
    assert plan.compiled.schedule.bare == {
        ("all-gather", ("expert",)): WHOLE / 2 / 2,
        ("all-reduce", ("fsdp", "expert")): 2 * WHOLE * 7 // 8,
    }


def test_utilisation_with_no_the_scheduled_and_full_overlap(plan):
    """The first gather takes longer than the product above it; what is left of it is waited for."""
    chip = plan.pod.chip
    product = max(3 * WHOLE / chip.hbm_bandwidth, 2 * 512**3 / chip.bf16_flops)
    gather, rest = (x / chip.ici_bandwidth for x in (WHOLE * 3 / 4, WHOLE / 4 + WHOLE * 7 / 4))
    assert gather > product
    seconds = plan.compiled.seconds()
    assert seconds == pytest.approx(
        {"no overlap": product + gather + rest, "as scheduled": gather + rest, "full overlap": gather + rest}
    )
    found = training.as_json(plan)
    assert found["calibration"] == "predicted, uncalibrated"
    assert found["compiled"]["exposed"] == [
        ["all-gather", ["expert"], WHOLE / 4],
        ["all-reduce", ["fsdp", "expert"], 2 * WHOLE * 7 // 8],
    ]
    mfu = plan.work.model / 8 / chip.bf16_flops / (product + gather + rest)
    assert found["compiled"]["utilisation"]["no overlap"] == pytest.approx(mfu)
    assert found["utilisation"]["full overlap"] == plan.utilisation(plan.bracket().seconds()["full overlap"])


def test_the_tables_say_it(plan, capsys):
    for table in training.tables(plan):
        Console(width=140).print(table)
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "compiled: exposed" in line]
    assert len(rows) == 2 and "all-gather" in rows[0] and "expert" in rows[0] and "131.07 kB" in rows[0]
    for name in ("no overlap", "as scheduled", "full overlap"):
        assert f"compiled: step, {name}" in out
    assert "(predicted, uncalibrated)" in out and "NOT IN THE PLAN" not in out
