"""`k3 plan --topology`: the ledger against the real state and full compilations, what travels, operations, errors."""

import dataclasses
import json
import math

import jax
import pytest

from k3_jax import audit
from k3_jax.cli import main
from k3_jax.config import MeshConfig
from k3_jax.plan import training
from k3_jax.plan.flows import Flow, bandwidth, unlisted
from k3_jax.plan.ledger import make_ledger
from k3_jax.plan.pod import pod
from k3_jax.plan.sizes import Sizes, shard_bytes
from k3_jax.plan.work import step_work
from k3_jax.recipe import load_recipe
from k3_jax.train.optimizer import describe
from k3_jax.train.state import new_model, start
from pallas_kernels.common import tpu
from pallas_kernels.common.traffic import Collective
from tests.models import run_of, tiny_config

PRETRAIN = "configs/k3_pretrain_tpu7x_512.py"
# Bytes of arguments and temporaries that libtpu 0.0.50.1 placed: docs/results.md, `k3 plan --compile`.
COMPILED = {
    "configs/k3_pretrain_tpu7x_512.py": ("tpu7x:8x8x8", 24_255_534_080, 59_827_551_168),
    "configs/k3_pretrain_v5p_1024.py": ("v5p:8x8x16", 24_255_534_080, 61_517_519_296),
    "configs/k3_pretrain_tpu7x_1024_1m.py": ("tpu7x:8x8x16", 11_623_506_944, 65_164_833_184),
}
MILLION = """all-gather expert; all-gather tensor; all-gather zigzag; all-reduce expert; all-reduce expert zigzag;
all-reduce expert zigzag tensor; all-reduce tensor; all-reduce zigzag; all-to-all expert zigzag; all-to-all tensor;
all-to-all zigzag; collective-permute zigzag; ragged-all-to-all expert; reduce-scatter expert; reduce-scatter zigzag"""
EIGHT = "v6e:2x4"  # as many devices as the tests' CPU has


def plan_of(path: str, topology: str, **data) -> training.TrainingPlan:
    run = load_recipe(path)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, **data))
    return training.plan_training(run, topology, lowered=False, effort=None)


@pytest.fixture(scope="module")
def pretrain():
    return plan_of(PRETRAIN, "tpu7x:8x8x8")


@pytest.mark.parametrize(
    "mesh", [MeshConfig(fsdp=4, tensor=2), MeshConfig(data=2, fsdp=2, expert=2), MeshConfig(pipe=2, fsdp=2, expert=2)]
)
def test_arguments_are_the_bytes_of_the_real_state(mesh):
    """The optimizer's state as Optax makes it, not as the table of rules says."""
    run = run_of(tiny_config(), mesh)
    with jax.sharding.use_abstract_mesh(pod(EIGHT).mesh(mesh)):
        state = jax.eval_shape(lambda: start(run, new_model(run)))
        ledger = make_ledger(run, pod(EIGHT), state.model)
    batch = ledger.arguments[-1].bytes
    assert batch == (4 + 4 + 1) * 8 * 16 // (mesh.data * mesh.fsdp * mesh.expert)
    assert ledger.argument_bytes - batch == pytest.approx(sum(map(shard_bytes, jax.tree.leaves(state))), abs=64)


def test_tokens_of_a_device_are_its_share():
    run = run_of(tiny_config(), MeshConfig(fsdp=2, context=4))
    assert Sizes.of(run, pod(EIGHT)).tokens == 8 * 16 // 8


def test_state_of_the_released_model(pretrain):
    """4 bytes per parameter in each of weights, momentum and gradient, over 1,024 devices; what is not cut is small."""
    groups = pretrain.ledger.by_group()
    per_device = 4 * 2_779_484_476_000 / 1024
    assert groups["weights"] == pytest.approx(per_device, rel=0.1)
    assert groups["optimizer"] == pytest.approx(groups["weights"], rel=0.04)
    assert groups["gradients"] == 2 * groups["weights"]  # of all micro-batches, and of this one
    assert pretrain.ledger.peak_bytes < tpu.TPU7X.program_hbm_bytes


@pytest.mark.parametrize("path", COMPILED)
def test_the_ledger_is_near_the_compiled_step(path):
    topology, arguments, temporaries = COMPILED[path]
    ledger = plan_of(path, topology).ledger
    assert ledger.argument_bytes == pytest.approx(arguments, rel=0.01)
    assert ledger.temporary_bytes == pytest.approx(temporaries, rel=0.15)


def test_all_that_the_compiled_step_of_a_million_tokens_sends_is_listed():
    """Over zigzag, expert and tensor; as compiled for docs/results.md."""
    flows = plan_of("configs/k3_pretrain_tpu7x_1024_1m.py", "tpu7x:8x8x16").flows
    kinds = [entry.split() for entry in MILLION.split(";")]
    assert unlisted([Collective(kind, tuple(axes), 1, 1, False) for kind, *axes in kinds], flows) == []
    muon = [x.bytes for x in flows if x.what.startswith("Muon") and x.axes == ("expert", "zigzag")]
    assert muon == [pytest.approx(7_930_492_416)]  # as compiled


def test_it_says_what_is_largest_when_it_does_not_fit(capsys):
    arguments = ["--config", PRETRAIN, "--topology", "tpu7x:8x8x8", "--set", "data.sequence_length=65536"]
    assert main(["plan", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())  # lines of the caption are joined
    assert "IT DOES NOT FIT" in out and "activations layer_input of 93 layers, kept 87.38 GB" in out
    assert "fewer tokens per device" in out


def test_a_row_over_ranks_is_expanded_whole_on_each():
    """1M tokens over 128 ranks: keys and values of four of 96 heads at a time, and as much of gradients."""
    mesh = MeshConfig(context=128, expert=8)
    run = dataclasses.replace(load_recipe(PRETRAIN), mesh=mesh)
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, sequence_length=2**20, batch_size=64))
    plan = training.plan_training(run, "tpu7x:8x8x8", lowered=False, effort=None)
    items = plan.ledger.moments["backward pass of an MLA layer"]
    assert [x.bytes for x in items if x.name.startswith("MLA")] == [2 * 2**20 * 4 * 256 * 2, 3 * 2**20 * 576 * 4]


def test_operations_are_six_per_active_parameter_and_token(pretrain):
    work, tokens = pretrain.work, 8192 * 8192
    assert work.tokens == tokens
    assert work.model / tokens == pytest.approx(6 * 104_189_612_640, rel=0.05)  # and attention
    assert 1.3 < work.executed / work.model < 1.6
    matrix = 5 * (4 * 3584 * 3072**2 + 2 * 3072**3)
    assert work.muon == pytest.approx(3 * 92 * 896 * matrix, rel=0.2)  # mostly the experts


def test_operations_of_one_token_by_hand():
    run = run_of(tiny_config(num_layers=1, mla_layers=(), moe=None, first_dense_layers=1), MeshConfig())
    shapes = audit.parameter_shapes(audit.abstract_model(run.model))
    work = step_work(run, shapes, describe(run.optimizer, run.model, shapes))
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name != "embed")
    delta_rule = 2 * (6 * 8 * 8 + 8 * 64 * 8 + 64**2)
    assert work.model == 3 * 8 * 16 * (2 * weights + delta_rule)


def test_bytes_that_travel(pretrain):
    """Of K3's layers at 8,192 tokens per device: docs/parallelism.md."""
    sent = {(flow.what, flow.axes): flow.bytes / 8 for flow in pretrain.flows}
    rows = 8192 * 16 * 3584 * 2
    assert sent["experts: rows", ("expert",)] == 92 * 7 * rows
    experts = 2 * 92 * 896 * 3 * 3584 * 3072 / 64
    assert sent["experts: gathered", ("fsdp",)] == pytest.approx(2 * experts * 15 / 16)
    assert sent["experts: gradients", ("fsdp",)] == pytest.approx(experts * 15 / 16)
    assert not [flow for flow in pretrain.flows if "context" in flow.axes]


def test_a_collective_that_is_not_in_the_plan_is_named():
    flows = [Flow("weights", "reduce-scatter", ("fsdp",), 1.0)]
    scatter, other = "reduce-scatter", "all-to-all"
    kinds = [(scatter, ("fsdp",)), ("all-reduce", ("fsdp",)), (other, ("fsdp",)), (scatter, ("expert",)), (other, ())]
    found = [Collective(kind, axes, 1, 1, False) for kind, axes in kinds]
    assert [(x.kind, x.axes) for x in unlisted(found, flows)] == [
        ("all-to-all", ("fsdp",)),
        ("reduce-scatter", ("expert",)),
    ]


def test_an_exchange_of_everybody_takes_more_of_the_links():
    ring, cube = (bandwidth(kind, ("fsdp",), tpu.TPU7X, {"fsdp": 1024}) for kind in ("all-gather", "all-to-all"))
    assert ring / cube == pytest.approx(6)  # 8 x 8 x 8 chips: two hops per axis
    assert bandwidth("all-to-all", ("fsdp",), tpu.V5P, {"fsdp": 1}) == tpu.V5P.ici_bandwidth


def test_brackets(pretrain):
    seconds = pretrain.bracket().seconds()
    assert seconds["no overlap"] > seconds["full overlap"] > 0
    assert pretrain.utilisation(seconds["full overlap"]) > pretrain.utilisation(seconds["no overlap"])
    assert pretrain.utilisation(pretrain.work.model / 1024 / tpu.TPU7X.bf16_flops) == pytest.approx(1)


def test_json(capsys):
    mesh = ["--set", "mesh.fsdp=-1", "--set", "mesh.context=2"]
    assert main(["plan", "--config", "configs/tiny.py", "--topology", "tpu7x:2x2x1", "--json", *mesh]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["chips"], found["devices"]) == (4, 8)
    assert found["ledger"]["peak_bytes"] == found["ledger"]["argument_bytes"] + found["ledger"]["temporary_bytes"]
    assert sum(found["ledger"]["by_group"].values()) == found["ledger"]["peak_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "v4:2x2x1"), "--topology = v4:2x2x1: chip = 'v4': expected one of v5p, v6e, tpu7x"),
        (("--topology", "tpu7x"), "--topology = tpu7x: expected chips after a colon, such as tpu7x:8x8x8"),
        (("--lower",), "--topology is missing"),
        (("--topology", "v5p:2x2x2", "--set", "mesh.pipe=8"), "8 x 1: expected at most 3 chunks"),
        (("--topology", "v5p:2x2x2", "--set", "mesh.fsdp=3"), "expected sizes that multiply to the 8 devices"),
        (("--topology", "v5p:2x2x2", "--set", "mesh.fsdp=8", "--set", "data.batch_size=4"), "data.batch_size = 4"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capsys, arguments, message):
    assert main(["plan", "--config", "configs/tiny.py", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
