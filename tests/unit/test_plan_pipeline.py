"""`k3 plan --topology` of a pipeline: the ledger against compilations, what each rank sends, how long it rests."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import jax
import pytest

from k3_jax.config import MeshConfig
from k3_jax.plan import training
from k3_jax.plan.flows import unlisted
from k3_jax.plan.pod import pod
from k3_jax.plan.stages import Stages
from k3_jax.recipe import load_recipe
from k3_jax.train.state import new_model, start
from pallas_kernels.common.traffic import Collective

FACTS = Path(__file__).parents[1] / "aot" / "facts" / "tiny_pipeline_tpu7x.json"
PRETRAIN = "configs/k3_pretrain_tpu7x_512.py"
# That recipe on four ranks with two chunks each, compiled at O1 by libtpu 0.0.50.1: bytes of arguments and temporaries,
# what the permutes of a step send, and the kinds of its collectives.
ARGUMENTS, TEMPORARIES, PERMUTED = 27_080_980_992, 68_793_790_112, 104_287_174_656
RECIPE = "configs/k3_pretrain_tpu7x_1024_pipe.py"  # 13.16 and 77.08 GB
KINDS = """all-gather expert; all-gather fsdp; all-gather pipe; all-reduce expert; all-reduce fsdp;
all-reduce fsdp expert; all-reduce fsdp pipe expert; all-reduce pipe; all-to-all fsdp; all-to-all fsdp expert;
collective-permute pipe; ragged-all-to-all expert; reduce-scatter fsdp"""


def changed(path: str, mesh: MeshConfig, **train):
    run = load_recipe(path)
    return dataclasses.replace(run, mesh=mesh, train=dataclasses.replace(run.train, **train))


@pytest.fixture(scope="module")
def plan():
    mesh = MeshConfig(pipe=4, interleave=2, fsdp=4, expert=64)
    run = changed(PRETRAIN, mesh, grad_accumulation=32)
    return training.plan_training(run, "tpu7x:8x8x8", lowered=False, effort=None)


def test_the_ledger_is_near_the_compiled_step(plan):
    assert plan.ledger.argument_bytes == pytest.approx(ARGUMENTS, rel=0.01)
    assert plan.ledger.temporary_bytes == pytest.approx(TEMPORARIES, rel=0.15)


def test_the_ledger_is_near_the_compiled_recipe():
    ledger = training.plan_training(load_recipe(RECIPE), "tpu7x:8x8x16", lowered=False, effort=None).ledger
    assert ledger.argument_bytes == pytest.approx(13.16e9, rel=0.01)
    assert ledger.temporary_bytes == pytest.approx(78.22e9, rel=0.15)


def tiled(shape: tuple[int, ...], width: int) -> int:
    """Bytes of an array in tiles of up to 8 x 128 numbers, in the order of axes that wastes least."""
    dims = [1, *(size for size in shape if size > 1)] if shape else [1]
    pairs = itertools.permutations(dims, 2) if len(dims) > 1 else [(1, 1)]

    def padded(rows: int, lanes: int) -> int:
        tile = 8 if rows > 4 else 4 if rows > 2 else rows
        return math.prod(dims) // (rows * lanes) * -(-rows // tile) * tile * -(-lanes // 128) * 128

    return width * min(padded(*pair) for pair in pairs)


def test_the_ledger_of_the_tiny_pipeline():
    """Its arrays are smaller than tiles: 4.4 MB of numbers take 7.5. Of temporaries the compiler's peak is compared."""
    report = json.loads(FACTS.read_text())["report"]
    run = changed("configs/tiny.py", MeshConfig(pipe=2, expert=2, tensor=2), grad_accumulation=2)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, compute_dtype="bfloat16"))
    ledger = training.plan_training(run, "tpu7x:2x2x1", lowered=False, effort=None).ledger
    with jax.sharding.use_abstract_mesh(pod("tpu7x:2x2x1").mesh(run.mesh)):
        state = jax.tree.leaves(jax.eval_shape(lambda: start(run, new_model(run))))
    shapes = [(x.sharding.shard_shape(x.shape) if x.sharding else x.shape, x.dtype.itemsize) for x in state]
    numbers = sum(math.prod(shape) * width for shape, width in shapes)
    batch = ledger.arguments[-1].bytes
    assert ledger.argument_bytes == pytest.approx(numbers + batch, abs=64)
    assert sum(tiled(*x) for x in shapes) + batch == pytest.approx(report["argument_bytes"], rel=0.01)
    temporaries = report["peak_bytes"] - report["argument_bytes"]
    assert ledger.temporary_bytes == pytest.approx(temporaries, rel=0.15)


def test_no_collective_of_the_compiled_step_is_missing(plan):
    flows = [flow for flows in plan.flows_of_ranks for flow in flows]
    kinds = [entry.split() for entry in KINDS.split(";")]
    assert unlisted([Collective(kind, tuple(axes), 1, 1, False) for kind, *axes in kinds], flows) == []


def test_rows_go_on_and_their_cotangents_back(plan):
    """Rank 0 gives four rows to rank 1, and four cotangents to rank 3, whose next chunk is its own; so do all."""
    for flows in plan.flows_of_ranks:
        assert sum(flow.bytes for flow in flows if flow.kind == "collective-permute") == PERMUTED


def test_one_rank_has_the_embedding_and_one_the_head(plan):
    ranks = [{flow.what for flow in flows} for flows in plan.flows_of_ranks]
    assert ["embedding: gradients" in flows for flows in ranks] == [True, False, False, False]
    assert ["head: gradients" in flows for flows in ranks] == [False, False, False, True]


def test_a_chunk_runs_forward_three_times_and_the_last_one_twice(plan):
    """Experts of one layer, 14 of them, gathered over four ranks: 231 MB for each of three weights."""
    stages = Stages.of(plan.run)
    passes = [rank.passes for rank in stages.ranks()]
    assert sorted(layer for rank in passes for layer in rank) == list(range(93))
    assert {layer for rank in passes for layer, count in rank.items() if count == 2} == set(range(84, 93))
    sent = {(flow.what, flow.axes): flow.bytes for flow in plan.flows_of_ranks[3]}
    weight = 14 * 3584 * 3072 * 2 * 3 // 4
    assert sent["experts: gathered", ("fsdp",)] == pytest.approx(32 * 3 * weight * (12 * 3 + 9 * 2))
    assert sent["experts: gradients", ("fsdp",)] == pytest.approx(32 * 3 * weight * (12 + 9))


def test_the_bubble_is_in_the_brackets(plan):
    """64 passes of 64 + 3. The last chunk is the cheapest, though it has the head."""
    bracket = plan.bracket()
    assert bracket.bubble == pytest.approx(3 / 67)
    assert bracket.seconds()["no overlap"] == pytest.approx((bracket.compute + bracket.transfer) * 67 / 64)
    assert 1 < Stages.of(plan.run).imbalance < 1.06
    assert 1.65 < plan.work.executed / plan.work.model < 1.8  # a third forward pass, of three units; else 1.44
    whole = Stages.of(load_recipe(PRETRAIN))
    assert whole.bubble == 0 and whole.imbalance == 1 and whole.mean_forward_passes == 2
