"""The whole training step of the tiny recipe, compiled for three TPU generations: it lowers, fits, and communicates as
the sharding table says. KDA is the Pallas kernels."""

import dataclasses

import pytest

from k3_jax.config import MeshConfig
from k3_jax.nn.grouping import Depth
from k3_jax.plan.step import lower_train_step
from k3_jax.plan.training import plan_training
from k3_jax.recipe import load_recipe
from k3_jax.train.pipeline import schedule_of
from pallas_kernels.common import aot, tpu

# Tracing and lowering a step takes 15 seconds: `make test` checks the facts of one generation.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("v5p:2x2x2", "v6e:2x4")]


@pytest.mark.parametrize("topology", [*SLOW, "tpu7x:2x2x1"])
def test_tiny_train_step(facts, topology):
    run = load_recipe("configs/tiny.py")
    train = dataclasses.replace(run.train, compute_dtype="bfloat16", grad_accumulation=2)
    run = dataclasses.replace(run, train=train, mesh=MeshConfig(fsdp=4, tensor=2))
    lowered = lower_train_step(run, list(aot.topology(topology).devices), "tpu")
    report = facts.check(f"tiny_step_{topology.partition(':')[0]}", lowered, topology)
    assert report.peak_bytes < tpu.chip(topology).hbm_bytes
    assert {"all-gather", "all-to-all"} <= set(report.collectives)  # weights over fsdp; Muon's blocks to their owners


@pytest.mark.slow
def test_tiny_pipeline(facts):
    """Two ranks; experts and heads cut too. Rows go on and their cotangents back; branches hold no permutes."""
    run, topology = load_recipe("configs/tiny.py"), "tpu7x:2x2x1"
    train = dataclasses.replace(run.train, compute_dtype="bfloat16", grad_accumulation=2)
    run = dataclasses.replace(run, train=train, mesh=MeshConfig(pipe=2, expert=2, tensor=2))
    lowered = lower_train_step(run, list(aot.topology(topology).devices), "tpu")
    rows = schedule_of(Depth(run.model, 2), 2).message
    assert lowered.as_text().count("stablehlo.collective_permute") == 2 * rows
    report = facts.check("tiny_pipeline_tpu7x", lowered, topology)
    assert {"collective-permute", "ragged-all-to-all"} & set(report.collectives)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "topology"), [("512", "tpu7x:8x8x8"), ("1024_pipe", "tpu7x:8x8x16")])
def test_full_size_step_lowers_for_a_pod(recipe, topology):
    """2.78T parameters on a pod: shapes, divisibility and sharding of every tensor of the step."""
    run = load_recipe(f"configs/k3_pretrain_tpu7x_{recipe}.py")
    text = lower_train_step(run, list(aot.topology(topology).devices), "tpu").as_text()
    assert len(text) < 20e6  # one body per layer kind, not 93 layers


@pytest.mark.aot_compile
@pytest.mark.parametrize("last", [1, 3], ids=["KDA", "MLA"])
def test_step_with_one_layer_of_each_kind(last):
    """The plan of a training step at K3's full widths, on all chips, against its compilation: the dense layer, and the
    layers up to the first of a kind. The whole model is `k3 plan --compile`; docs/results.md has its figures."""
    run = load_recipe("configs/k3_pretrain_tpu7x_512.py")
    model = dataclasses.replace(run.model, num_layers=last + 1, mla_layers=(3,) if last == 3 else ())
    plan = plan_training(dataclasses.replace(run, model=model), "tpu7x:8x8x8", lowered=False, effort="O1")
    assert plan.compiled.argument_bytes == pytest.approx(plan.ledger.argument_bytes, rel=0.02)
    assert plan.compiled.temporary_bytes == pytest.approx(plan.ledger.temporary_bytes, rel=0.25)
    assert plan.strangers == []
