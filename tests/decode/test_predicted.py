"""The model of time, the published kernel under it, stages against the plan, loops and branches of a schedule."""

import dataclasses

import numpy as np
import pytest

from k3_jax.bench.decode_program import plan_of
from k3_jax.recipe import load_recipe
from pallas_kernels.common.dump import DumpError
from pallas_kernels.decode import predicted, published
from pallas_kernels.decode.bench import facts, least_bytes, model_against, stages
from pallas_kernels.decode.compiled import Code, outermost, stage_bundles
from pallas_kernels.decode.ledger import Ledger, padded_bytes
from pallas_kernels.decode.plan import BESIDE
from pallas_kernels.decode.predicted import RATES, predictions, step_times
from pallas_kernels.decode.stages import (
    EMBED,
    HEAD,
    MIX,
    START_BLOCK,
    Stage,
    StageBundles,
    channel_stages,
    mixer_stages,
    sum_stages,
)
from pallas_kernels.decode.timeline import Compute, Fetch, Rates, Send, Wait, play

UNIT = Rates(phase=1.0, hbm=1.0, bundles=1.0, links=1.0)


@pytest.fixture(scope="module")
def k3():
    return load_recipe("configs/k3.py").model


@pytest.fixture(scope="module")
def plan(k3):
    return plan_of(k3, ranks=32, rows=1, context=1000)


@pytest.fixture(scope="module")
def short(k3):
    """K3's first and last layers: 10 of KDA, 3 of MLA."""
    return plan_of(dataclasses.replace(k3, num_layers=13, mla_layers=(3, 7, 12)), ranks=32, rows=1, context=1000)


def free(plan, **changes):
    """No arithmetic in any stage but those of `changes`."""
    names = [
        s.name for x in (False, True) for s in (*mixer_stages(plan, x), *sum_stages(plan), *channel_stages(plan, x))
    ]
    return dict.fromkeys((*names, EMBED, HEAD, MIX, START_BLOCK), StageBundles(0.0)) | changes


@pytest.mark.parametrize(
    ("program", "seconds"),
    [
        ([Fetch("a", 2), Compute(3), Wait("a")], 3),
        ([Fetch("a", 2), Wait("a"), Compute(3)], 5),
        ([Fetch("a", 2), Fetch("b", 3), Wait("b")], 5),  # one after the other
        ([Compute(4), Fetch("a", 2), Wait("a")], 6),
        ([Send("x", 0), Compute(0.5), Wait("x")], 1),
        ([Send("x", 3), Wait("x")], 3),  # the links are slower than the latency
        ([Fetch("a", 2), Send("x", 0), Wait("x"), Wait("a")], 2),
    ],
)
def test_time_by_hand(program, seconds):
    times = play(program, UNIT)
    assert times.now == pytest.approx(seconds)
    assert times.compute + times.exchanges + times.hbm == pytest.approx(seconds)


def test_a_wait_without_an_issue():
    with pytest.raises(KeyError):
        play([Fetch("a", 1), Wait("a"), Wait("a")], UNIT)


def test_a_step_without_arithmetic(plan):
    """Every exchange of the plan is waited for, every byte of the ledger is issued."""
    times = step_times(plan, free(plan), context=0)
    assert times.sends == len(plan.step_exchanges) + len(BESIDE) * len(plan.config.moe_layers)
    assert times.exchanges == pytest.approx(len(plan.step_exchanges) * 4e-6, rel=1e-6)
    cache = 24 * 2 * plan.config.blocks.cache_rows * plan.config.key_width
    embed = 2 * 256  # fetched by its owner's rows, not in the model
    assert times.bytes + embed - cache == pytest.approx(Ledger(plan).step_bytes / 32, rel=2e-4)
    assert times.now >= times.bytes / RATES.hbm


def test_no_more_hides_than_the_ring_holds(short):
    """With a latency in which a whole ring arrives, tiles beyond it are waited for."""
    blocks = dataclasses.replace(short.config.blocks, banks=8)
    small = dataclasses.replace(short, config=dataclasses.replace(short.config, blocks=blocks))
    long = dataclasses.replace(RATES, phase=1e-3)
    waits = [step_times(x, free(x), 0, long).hbm for x in (short, small)]
    assert waits[1] > waits[0] > 0
    tile = 2 * blocks.tile_rows * blocks.tile_cols
    hidden = len(short.step_exchanges) * 48 * tile
    assert waits[0] >= (short.tape.tiles * tile - hidden) / RATES.hbm


def test_arithmetic_is_not_lost(short):
    experts, up = StageBundles(10.0, first=20.0, expert=5.0), StageBundles(3.0, during=4.0)
    found = free(short, **{"kda.mix": StageBundles(1430.0), "moe.experts": experts, "moe.up": up})
    times = step_times(short, found, context=0)
    assert times.compute == pytest.approx((10 * 1430 + 12 * (10 + 20 + 16 * 5 + 3 + 4)) / 1.43e9)


def test_what_is_before_a_wait_hides_under_the_exchange(short):
    """All but what is longer than the exchange."""
    bundles = RATES.phase * RATES.bundles
    step = lambda **up: step_times(short, free(short, **{"moe.up": StageBundles(**up)}), 0).now  # noqa: E731
    shown = step(once=0.0, during=1.5 * bundles) - step(once=0.0)
    assert 0.4 * 12 * RATES.phase < shown < 0.6 * 12 * RATES.phase
    assert step(once=0.0, during=0.5 * bundles) - step(once=0.0) < 0.1 * 12 * RATES.phase


def test_stages_hold_the_tape(plan):
    found = {x["name"]: x["dma_bytes"] for x in stages(plan, free(plan))}
    record = 4 * 40 * 3584
    assert found["moe.experts"] == 16 * record and found["moe.end"] == 0
    up = sum(p.rows for name in ("shared_out", "up") for block in plan.tape.moe.of(name) for p in block.pieces)
    assert found["moe.up"] == 2 * up * plan.config.blocks.tile_cols
    kda = sum(p.rows for block in plan.tape.kda.blocks for p in block.pieces)
    assert found["kda.mix"] == 2 * kda * plan.config.blocks.tile_cols


def test_published_kernel():
    """Its bytes as known from its sources, the mean of its fullest group, and what was fitted."""
    assert published.KDA / 1e6 == pytest.approx(31.3, abs=0.1) and published.EXPERT / 1e6 == pytest.approx(
        7.01, abs=0.01
    )
    most, mean = published.busiest(1, 8)
    assert mean == 2 and most / mean == pytest.approx(2.09, abs=0.02)
    fitted = published.fit(RATES)
    assert fitted.layer >= 0 and fitted.row >= 0
    for batch in published.FITTED:
        found = batch / published.step_seconds(batch, fitted, RATES)
        assert found == pytest.approx(published.TOKENS_PER_SECOND[batch], rel=1e-3)


def test_predictions_of_k3(plan, monkeypatch):
    monkeypatch.setattr(predicted, "PHASES_US", (3.0, 4.0))
    found = predictions(plan, free(plan), context=576)
    fast, usual = found["sensitivity"]
    assert usual["tokens_per_s"] == found["predicted_tokens_per_s"] < fast["tokens_per_s"]
    assert usual["ratio"] == pytest.approx(usual["tokens_per_s"] / 249, rel=1e-3)
    assert found["predicted_published_tokens_per_s"] == pytest.approx(249, rel=1e-3)
    assert found["published"]["held_out_error"].keys() == {2, 4}


def test_nothing_published_of_long_contexts(short, plan, monkeypatch):
    monkeypatch.setattr(predicted, "PHASES_US", (4.0,))
    for other, context in ((short, 576), (plan, 1153)):
        found = predictions(other, free(other), context)
        assert found["published"] is found["predicted_published_tokens_per_s"] is None


def test_facts_of_the_plan(plan):
    from pallas_kernels.common import tpu
    from pallas_kernels.decode.bench import Program

    report = {"peak_bytes": 50 * 2**30, "custom_calls": {"tpu_custom_call": 1}}
    found = facts(plan, Program(free(plan), 1, tpu.MIB, 0, report), tpu.TPU7X)
    assert found["hbm_gib_per_core"] == 50 and found["vmem_mib_per_core"] == 1
    assert found["collective_phases_per_layer"] == {"kda": 4, "mla": 5}
    assert found["bytes_minimum"] == pytest.approx(Ledger(plan).minimum_bytes)
    assert found["bytes_over_minimum"] == pytest.approx(1.082, abs=1e-3)
    assert found["max_rank_over_mean"] == 1 and found["weight_copies"] == 1 and found["prefill_fits"]
    full = Program(free(plan), 1, tpu.MIB, 0, report | {"peak_bytes": 94 * 2**30})
    assert not facts(plan, full, tpu.TPU7X)["prefill_fits"]


def test_shared_experts_are_read_once(k3):
    """At 8 rows 120.3 of 128 choices are different."""
    ledger = Ledger(plan_of(k3, 32, 8, 1000))
    spared = (ledger.minimum_bytes - least_bytes(ledger)) / 92 / ledger.expert_bytes
    assert 128 - spared == pytest.approx(120.3, abs=0.1)


def test_mla_everywhere(k3, short):
    other = plan_of(dataclasses.replace(k3, num_layers=13, mla_layers=tuple(range(1, 13))), 32, 1, 1000)
    found = model_against(short, other, free(short, **{"mla.attend": StageBundles(0.0, tile=1000.0)}), context=1000)
    assert found["slower"] > 1 and found["model_bytes_ratio"] == pytest.approx(0.98, abs=0.01)


# A schedule made by hand: per layer a block, then KDA, MLA, dense and MoE, each bundle of the text one instruction.


def schedule(plan, missing: str = ""):
    """Branches in which every stage computes for a bundle, waits, computes for another one and sends; a send to each
    peer is one bundle more, and so are a loop over experts and one over the cache."""
    layers, c = len(plan.config.layers), plan.config
    text, counts, loops, undecided = ["a"], [1], [], []

    def add(word, times=1, loop=False):
        text.append(word)
        counts.append(layers * times)
        if loop:
            loops.append((len(text) - 1, len(text)))

    def size(name):
        return padded_bytes(plan.exchange_buffers[name]) // c.ranks // 32

    def branch(stages):
        start = len(text)
        for stage in stages:
            add("during")
            if stage.awaits:
                number = list(plan.exchanges).index(stage.awaits)
                place = f" + $0x{number:x}" if number else ""
                add(f"%1 = dma.done.wait [#allocation7{place}], {size(stage.awaits) * (c.ranks - 1)}")
            add("once")
            if stage.experts:
                for _ in range(16):
                    add(f"%1 = dma.hbm_to_vmem [thread:$0]  %s1, {4 * 40 * 3584 // 32}, %s2, [#allocation3]")
                add("prepare")
                add(f"%1 = dma.done.wait %s1, {4 * 40 * 3584 // 32}")
                add("expert", 48, loop=True)
            if stage.attention:
                add("tile", 1, loop=True)
                undecided.append(loops[-1])
            for _ in range((c.ranks - 1) * (stage.ends not in (None, missing))):
                add(f"%1 = dma.general %s1, {size(stage.ends)}, %s1, %s2, %s3, [#allocation9], %s4, 0")
        undecided.append((start, len(text)))

    for mla in (False, True):
        branch(mixer_stages(plan, mla))
    branch([Stage("block")])
    branch(sum_stages(plan))
    undecided.pop()
    for moe in (False, True):
        branch(channel_stages(plan, moe))
    loops.append((1, len(text)))
    text, counts = [*text, "head"], [*counts, 1]
    ones = np.ones(len(text), int)
    return Code(text, ones, np.array(counts), tuple(sorted(loops)), tuple(sorted(undecided)))


def test_bundles_of_stages(plan):
    found = stage_bundles(schedule(plan), plan)
    assert found["kda.mix"] == StageBundles(2 + 31) and found["mixer.end"] == StageBundles(2, during=1)
    assert found["mla.attend"] == StageBundles(2 + 31, during=1, tile=1)
    assert found["moe.shared"] == StageBundles(2 + 31)
    assert found["moe.experts"] == StageBundles(1, during=1, first=2 + 16, expert=(1 + 48 + 31) / 16)
    assert found[HEAD] == found[EMBED] == StageBundles(1) and found[START_BLOCK] == StageBundles(2)
    assert found[MIX] == StageBundles(0.0) and found.keys() == free(plan).keys()


def test_a_schedule_that_is_not_the_plan(plan):
    with pytest.raises(DumpError, match="kda.mix: 0 copies to other ranks: expected 31"):
        stage_bundles(schedule(plan, missing="mixer_sum"), plan)
    other = dataclasses.replace(plan, config=dataclasses.replace(plan.config, rows=2))
    with pytest.raises(DumpError, match="copies to other ranks|no wait for"):
        stage_bundles(schedule(plan), other)


def test_outermost():
    assert outermost([(5, 9), (1, 4), (2, 3), (5, 7)]) == [(1, 4), (5, 9)]
