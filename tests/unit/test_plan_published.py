"""`k3 plan --published`: Kimi-K2's shape against its checkpoint, its operations and bytes by hand, where it lands."""

import json

import pytest

from k3_jax.cli import main
from k3_jax.plan.published import KIMI_K2, muon_bytes, muon_operations, numbers, plan_published

SHAPE = KIMI_K2.shape


@pytest.fixture(scope="module")
def plan():
    return plan_published(KIMI_K2)


def test_parameters_are_those_of_the_checkpoint():
    """1,026,408,232,448 numbers in the released files: matrices, norms, and a bias for each expert and layer."""
    norms = SHAPE.num_layers * (2 * SHAPE.hidden_size + SHAPE.q_lora_rank + SHAPE.kv_lora_rank) + SHAPE.hidden_size
    biases = SHAPE.moe_layers * SHAPE.num_experts
    assert SHAPE.parameters + norms + biases == 1_026_408_232_448
    active = numbers(SHAPE.of_all_tokens()) + SHAPE.experts * 8 // 384 + SHAPE.head
    assert active == 31_686_066_176


def test_operations(plan):
    """Six per active parameter and token, and attention; one more forward pass of the layers."""
    tokens = 512 * 16 * 1024
    attention = 3 * 61 * 64 * (128 + 64 + 128) * 1025
    assert plan.work.tokens == tokens
    assert plan.work.model == tokens * (6 * 31_686_066_176 + attention)
    layers = 1 - 6 * SHAPE.head * tokens / plan.work.model
    assert (plan.work.executed - plan.work.muon) / plan.work.model == pytest.approx(1 + layers / 3)


def test_muon_is_what_xla_makes_of_it():
    """Two layers of one weight, [384, 2, 7168, 2048] over fsdp = 64 and expert = 8, with Optax's iteration compiled for
    tpu7x:4x8x8 by libtpu 0.0.50.1: operations and bytes of a device."""
    matrix, held = (7168, 2048), 2 * 384 // 8
    assert held * muon_operations(matrix, 64) // 64 == pytest.approx(9_148_280_340_480, rel=1e-3)
    assert held * muon_bytes(matrix, 64) == 5 * 1_585_446_912


def test_bytes(plan):
    """48 experts of each of 60 layers from 64 ranks; tokens of 8 ranks, five times per layer."""
    sent = {flow.what: flow.bytes for flow in plan.flows}
    local = 60 * 48 * 3 * 7168 * 2048 * 2
    assert sent["experts: gathered"] == pytest.approx(2 * local * 63 / 64)
    assert sent["experts: tokens"] + sent["experts: sums"] == 5 * 60 * 7 * 16 * 1024 * 7168 * 2


def test_the_measured_step_is_longer_than_without_any_overlap(plan):
    """6.43 % of 512 cores' peak."""
    assert plan.measured_seconds == pytest.approx(plan.work.model / 512 / 1155e12 / 0.0643)
    assert plan.measured_seconds > plan.bracket.seconds()["no overlap"] > plan.bracket.seconds()["full overlap"]


def test_json(capsys):
    assert main(["plan", "--published", "kimi-k2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calibration"] == "predicted, uncalibrated" and found["utilisation"]["measured"] == 0.0643
    assert found["seconds"]["measured"] / found["seconds"]["no overlap"] == pytest.approx(3.7, rel=0.05)


def test_the_table_says_where_it_lands(capsys):
    assert main(["plan", "--published", "kimi-k2"]) == 0
    out = capsys.readouterr().out
    assert "step, measured (MaxText, pull request 3632)" in out and "the measured one takes 3.7 times as long" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--published", "kimi-k3"], "invalid choice: 'kimi-k3'"),
        (["--published", "kimi-k2", "--config", "configs/k3.py"], "not allowed with argument"),
        (["--published", "kimi-k2", "--topology", "tpu7x:8x8x8"], "expected no --topology, which is for a recipe"),
        (["--published", "kimi-k2", "--set", "a=1"], "expected no --set"),
        ([], "one of the arguments --config --published is required"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, message, capsys):
    try:
        status = main(["plan", *arguments])
    except SystemExit as exit:
        status = exit.code
    assert status == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
