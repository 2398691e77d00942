"""The replay of a scheduled program: a transfer under a product, one that is waited for, and a synchronous one."""

import dataclasses

import pytest

from pallas_kernels.common import tpu
from pallas_kernels.common.hlo import flops, read_hlo
from pallas_kernels.common.overlap import Transfer, replay


def of(seconds: float):
    """What a collective costs: 40 kB in so many seconds."""
    return lambda op, *_: Transfer(40_000.0, float(seconds), op.name)


CHIP = dataclasses.replace(tpu.TPU7X, bf16_flops=2e6, hbm_bandwidth=1e30)  # a product of 100 x 100 takes one second
TEXT = """\
HloModule m, is_scheduled=true

%fused (p0: f32[100,100], p1: f32[100,100]) -> f32[100,100] {
  %p0 = f32[100,100]{1,0} parameter(0)
  %p1 = f32[100,100]{1,0} parameter(1)
  ROOT %convolution.1 = f32[100,100]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

%body (q: f32[100,100]) -> f32[100,100] {
  %q = f32[100,100]{1,0} parameter(0)
  ROOT %all-reduce.1 = f32[100,100]{1,0} all-reduce(%q), to_apply=%sum
}

ENTRY %main (a: f32[100,100], b: f32[100,100]) -> f32[100,100] {
  %a = f32[100,100]{1,0} parameter(0)
  %b = f32[100,100]{1,0} parameter(1)
  %ragged-all-to-all.1.call-start = () call-start(), async_execution_thread="sparsecore"
  %ragged-all-to-all.1.call-update = (f32[100,100]{1,0}) call-update(%ragged-all-to-all.1.call-start, %a)
  %fusion.1 = f32[100,100]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused
  %ragged-all-to-all.1.call-done = f32[100,100]{1,0} call-done(%ragged-all-to-all.1.call-update)
  %all-gather-start = (f32[100,100]{1,0}) all-gather-start(%fusion.1)
  %all-gather-done = f32[100,100]{1,0} all-gather-done(%all-gather-start)
  ROOT %while.1 = f32[100,100]{1,0} while(%all-gather-done), condition=%always, body=%body
}
"""


@pytest.mark.parametrize(("seconds", "exposed"), [(0.75, 1.5), (1.5, 3.5)])
def test_replay(seconds, exposed):
    """Three transfers: under one second of work, under none, and one that has no start."""
    found = replay(TEXT, CHIP, of(seconds))
    assert found.compute == pytest.approx(1)
    assert found.transfer == pytest.approx(3 * seconds)
    assert found.exposed == pytest.approx(exposed)
    assert (found.sent, found.covered) == (120_000, 40_000)
    assert found.covered_share == pytest.approx(1 / 3)
    assert found.bare == {"all-gather-start": 40_000, "all-reduce.1": 40_000}
    assert found.hidden_share == pytest.approx(1 - exposed / (3 * seconds))


TWO_AT_ONCE = """\
%fused (p0: f32[100,100], p1: f32[100,100]) -> f32[100,100] {
  %p0 = f32[100,100]{1,0} parameter(0)
  %p1 = f32[100,100]{1,0} parameter(1)
  ROOT %convolution.1 = f32[100,100]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

ENTRY %main (a: f32[100,100], b: f32[100,100]) -> f32[100,100] {
  %a = f32[100,100]{1,0} parameter(0)
  %all-gather-start = (f32[100,100]{1,0}) all-gather-start(%a)
  %all-reduce-start = f32[100,100]{1,0} all-reduce-start(%a)
  %copy-start = (f32[100,100]{1,0}, f32[100,100]{1,0:S(1)}) copy-start(%a)
  %fusion.1 = f32[100,100]{1,0} fusion(%a, %a), kind=kOutput, calls=%fused
  %all-gather-done = f32[100,100]{1,0} all-gather-done(%all-gather-start)
  ROOT %all-reduce-done = f32[100,100]{1,0} all-reduce-done(%all-reduce-start)
}
"""


def test_links_carry_one_transfer_after_the_other():
    """Two transfers of 0.75 s each under one second of work; without bandwidth, the product waits for its operands."""
    found = replay(TWO_AT_ONCE, CHIP, of(0.75))
    assert (found.compute, found.exposed, found.covered_share) == pytest.approx((1, 0.5, 1))
    peak = found.utilisation(CHIP)
    assert (peak["none"], peak["scheduled"], peak["full"]) == pytest.approx((1 / 2.5, 1 / 1.5, 1 / 1.5))
    slow = replay(TWO_AT_ONCE, dataclasses.replace(CHIP, hbm_bandwidth=60_000), of(0))
    assert slow.compute == pytest.approx(2)  # two operands, which are one array, and the result


BRANCHES = """\
%fused (p0: f32[100,100], p1: f32[100,100]) -> f32[100,100] {
  %p0 = f32[100,100]{1,0} parameter(0)
  %p1 = f32[100,100]{1,0} parameter(1)
  ROOT %convolution.1 = f32[100,100]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

%body (q: f32[100,100]) -> f32[100,100] {
  %q = f32[100,100]{1,0} parameter(0)
  ROOT %fusion.1 = f32[100,100]{1,0} fusion(%q, %q), kind=kOutput, calls=%fused
}

%three (q: f32[100,100]) -> pred[] {
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%n, %n), direction=LT
}

%rest (r: f32[100,100]) -> f32[100,100] {
  ROOT %r = f32[100,100]{1,0} parameter(0)
}

%work (r: f32[100,100]) -> f32[100,100] {
  %r = f32[100,100]{1,0} parameter(0)
  %all_to_all.7 = f32[100,100]{1,0} all-to-all(%r)
  ROOT %while.1 = f32[100,100]{1,0} while(%all_to_all.7), condition=%three, body=%body
}

ENTRY %main (i: s32[], a: f32[100,100]) -> f32[100,100] {
  %i = s32[] parameter(0)
  %a = f32[100,100]{1,0} parameter(1)
  ROOT %conditional.1 = f32[100,100]{1,0} conditional(%i, %a, %a), BRANCH
}
"""


@pytest.mark.parametrize(
    "branch", ["branch_computations={%rest, %work}", "true_computation=%work, false_computation=%rest"]
)
def test_a_rank_that_works_takes_the_longest_branch(branch):
    """An exchange of half a second, under JAX's name, and a product of one second three times."""
    found = replay(BRANCHES.replace("BRANCH", branch), CHIP, of(0.5))
    assert (found.compute, found.exposed) == pytest.approx((3, 0.5))
    assert found.bare == {"all_to_all.7": 40_000}


def test_what_is_left_out_costs_nothing_and_a_done_needs_its_start():
    found = replay(TEXT, CHIP, lambda *_: None)
    assert (found.compute, found.transfer, found.sent) == pytest.approx((1, 0, 0))
    with pytest.raises(KeyError):
        replay(TEXT.replace("all-gather-done(%all-gather-start)", "all-gather-done(%a)"), CHIP, of(1))


GROUPED = """\
ENTRY %main (x: bf16[64,8], w: bf16[3,8,16], y: bf16[64,16]) -> f32[64,16] {
  %n = s32[4]{0} parameter(0)
  %x = bf16[64,8]{1,0} parameter(1)
  %w = bf16[3,8,16]{2,1,0} parameter(2)
  %y = bf16[64,16]{1,0} parameter(3)
  %ragged-dot-none.1 = f32[64,16]{1,0} custom-call(%n, %x, %w), custom_call_target="tpu_custom_call"
  %ragged-dot-none.2 = f32[3,8,16]{2,1,0} custom-call(%n, %x, %y), custom_call_target="tpu_custom_call"
  ROOT %kernel.1 = f32[64,8]{1,0} custom-call(%n, %y, %w), backend_config={"a":{"cost_estimate":{"flops":"16384"}}}
}
"""


def test_operations_of_kernels():
    computations = read_hlo(GROUPED)
    main = computations["main"]
    for name in ("ragged-dot-none.1", "ragged-dot-none.2", "kernel.1"):
        assert flops(main[name], main, computations) == 2 * 64 * 8 * 16
    assert flops(main["x"], main, computations) == 0


BATCHED = """\
ENTRY %main (x: f32[8,64,16], w: f32[8,16,32]) -> f32[8,64,32] {
  %x = f32[8,64,16]{2,1,0} parameter(0)
  %w = f32[8,16,32]{2,1,0} parameter(1)
  %dot.1 = f32[8,64,32]{2,1,0} dot(%x, %w), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}
  ROOT %convolution.1 = f32[8,64,32]{2,1,0} convolution(%x, %w), window={size=8}, dim_labels=0bf_0io->0bf
}
"""


def test_operations_of_batched_products():
    main = read_hlo(BATCHED)["main"]
    for name in ("dot.1", "convolution.1"):
        assert flops(main[name], main, {"main": main}) == 2 * 8 * 64 * 16 * 32
