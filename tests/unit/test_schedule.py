"""Following the control flow of a schedule, and reading HLO, on small texts; tests/aot compiles real programs."""

import textwrap
from collections import Counter

import numpy as np
import pytest

from pallas_kernels.common.bundles import called_ops, execute, read_bundles
from pallas_kernels.common.dump import DumpError
from pallas_kernels.common.hlo import hbm_bytes, read_hlo
from pallas_kernels.common.schedule import Work, issued_of

# A loop of four iterations; the first alone executes bundle 5. Branches take effect one bundle later.
LOOP = """
LB: loop body

     0   :  { %s1_s0 = smov 0 /* a comment with { } ;; and a line
break */  ;;  %10 = sst [smem:[#allocation3_spill]] %s1_s0 }
   0x1   :  {}
   0x2 LB: > { %s2_s0 = sphi %s1_s0, %s3_s0  ;;  %p4_p0 = scmp.ne.s32.totalorder %s2_s0, 0 }
   0x3   : > { %5 = sbr.rel (GUARD) target bundleno = 6 (0x6)  ;;  %s9_s4 = sld [smem:[#allocation5 + %s2_s0]] }
   0x4   : > { %p8_p2 = scmp.eq.s32.totalorder %s9_s4, 7 }
   0x5   : > { %v1_v0 = vld [vmem:[%s0_s1] sm:$0xff] }
   0x6 PF: > { %v2_v0 = vadd.f32 %v1_v0, %v1_v0  ;;  %s11_s2 = sld [smem:[#allocation3_spill]] }
   0x7   : > { %s3_s0 = sadd.s32 1, %s2_s0  ;;  %s12_s2 = sadd.s32 2, %s11_s2 }
   0x8   : > { %p6_p1 = scmp.ge.s32.totalorder %s12_s2, 8  ;;  %13 = sst [smem:[#allocation3_spill]] %s12_s2 }
   0x9   : > { %7 = sbr.rel (!%p6_p1) target bundleno = 2 (0x2), region = 8 }
   0xa   : > {}
   0xb   :  { %15 = inlined_call %s0_s0 /* %copy.5 = copy(%x) */ }
"""


def follow(guard: str, table: int | None = None):
    return execute(read_bundles(LOOP.replace("GUARD", guard)), branch_delay=1, table=table)


def test_bundles_and_calls_are_read():
    bundles = read_bundles(LOOP)
    assert len(bundles) == 12 and [i for i, bundle in enumerate(bundles) if not bundle] == [1, 10]
    assert [i for i, names in enumerate(called_ops(LOOP)) if names == ["copy.5"]] == [11]


def test_a_loop_with_work_in_the_first_step():
    """The counter of the exit test goes through a cell of memory, as spilled registers do."""
    execution = follow("%p4_p0")
    assert execution.counts == [1, 1, 4, 4, 4, 1, 4, 4, 4, 4, 4, 1]
    assert execution.steady == [0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]
    assert execution.steps == 4 and not execution.undecided


@pytest.mark.parametrize(("table", "times", "undecided"), [(None, 4, {(5, 6)}), (0, 4, set()), (7, 0, set())])
def test_a_branch_that_depends_on_data(table, times, undecided):
    """Unknown, it is counted, and said. The predicate is computed behind the branch, before it takes effect."""
    execution = follow("%p8_p2", table)
    assert execution.counts[5] == times and execution.undecided == undecided
    assert execution.steps == 4


def test_a_loop_of_unknown_length_is_counted_once():
    execution = execute(read_bundles(LOOP.replace("GUARD", "%p4_p0").replace("%s12_s2, 8", "%s99_s9, 8")), 1)
    assert execution.counts == [1] * 12 and execution.undecided == {(2, 11)}


@pytest.mark.parametrize(("length", "times", "undecided"), [(None, 1, {(2, 11)}), (6, 6, set()), (1, 1, set())])
def test_a_loop_whose_length_is_an_operand(length, times, undecided):
    operand = "%s99_s9 = inlined_call_operand.<no memory space> [shape: s32[1], index: 0]  ;;  %s1_s0 = smov 0"
    text = LOOP.replace("GUARD", "%p4_p0").replace("%s1_s0 = smov 0", operand, 1)
    text = text.replace("%s12_s2 = sadd.s32 2, %s11_s2", "%s12_s2 = sadd.s32 1, %s11_s2")
    execution = execute(read_bundles(text.replace("%s12_s2, 8", "%s12_s2, %s99_s9")), 1, length=length)
    assert execution.counts[6] == execution.steps == times and execution.undecided == undecided


def test_predicated_moves_and_selects():
    """smov (condition, otherwise), value."""
    text = """
         0 :  { %p1_p0 = scmp.lt.u32.totalorder 4294967295, 1  ;;  %s2_s0 = smov (%p1_p0, %s3_s0), 5 }
       0x1 :  { %s4_s1 = scalar_select /*predicate=*/%p1_p0, /*on_true=*/1, /*on_false=*/0  ;;  %p6_p1 = pneg %p1_p0 }
       0x2 :  { %p5_p2 = por %p6_p1, %p99_p9 }
       0x3 :  { %7 = sbr.rel (%p5_p2) target bundleno = 5 (0x5), region = 2 }
       0x4 :  { %v1_v0 = vld [vmem:[%s0_s1] sm:$0xff] }
       0x5 :  {}
    """
    execution = execute(read_bundles(text), branch_delay=0)
    assert execution.counts == [1, 1, 1, 1, 0, 1] and not execution.undecided


def test_issued_bundles():
    """All instructions, and as many of the waits between them as are left."""
    assert issued_of(["a", "", "", "b", ""], ["a", "", "b"]).tolist() == [1, 1, 0, 1, 0]
    with pytest.raises(DumpError, match="do not hold the same"):
        issued_of(["a", "", "b"], ["a"])


def test_work():
    one = Work(10, 15, Counter(MXU=5, SPILL=2), {"MXU": 2, "SPILL": 2})
    both = one * 3 + one
    assert (both.bundles, both.cycles, both.slots["MXU"]) == (40, 60, 20)
    assert both.share("MXU") == 0.25 and both.share("SPILL") == pytest.approx(0.1)
    assert sum((one, one), Work()).share("MXU") == 0.25


HLO = textwrap.dedent("""\
    %inner (p: f32[64,8]) -> f32[64,8] {
      %p = f32[64,8]{1,0} parameter(0)
      ROOT %c = f32[64,8]{0,1} copy(%p)
    }

    %slices (table: f32[64,8], i: s32[], old: bf16[64,8], x: bf16[1,8]) -> bf16[64,8] {
      %table = f32[64,8]{1,0} parameter(0)
      %view = f32[64,8]{0,1} fusion(%table), kind=kLoop, calls=%inner
      %i = s32[]{:S(6)} parameter(1)
      %zero = s32[] constant(0)
      %piece = f32[1,8]{1,0} dynamic-slice(%view, %i, %zero), dynamic_slice_sizes={1,8}
      %x = bf16[1,8]{1,0} parameter(3)
      %half = bf16[1,8]{1,0} convert(%piece)
      %new = bf16[1,8]{1,0} add(%half, %x)
      %old = bf16[64,8]{1,0} parameter(2)
      ROOT %out = bf16[64,8]{1,0} dynamic-update-slice(%old, %new, %i, %zero)
    }

    ENTRY %main (a: f32[64,8], b: bf16[64,8]) -> bf16[64,8] {
      %a = f32[64,8]{1,0:T(8,128)} parameter(0)
      %b = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(1)
      %n = s32[]{:T(128)S(6)} constant(3)
      %near = (bf16[64,8]{1,0:T(8,128)(2,1)S(1)}, bf16[64,8]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
      %b2 = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} copy-done(%near)
      %k.1 = (bf16[1,8]{1,0}, f32[4]{0:S(1)}) custom-call(%a, %b2), custom_call_target="tpu_custom_call", backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"4096"}]}
      %row = bf16[1,8]{1,0} get-tuple-element(%k.1), index=0
      ROOT %fusion.2 = bf16[64,8]{1,0} fusion(%a, %n, %b, %row), kind=kLoop, calls=%slices
    }
""")  # noqa: E501


def test_hbm_traffic_of_ops():
    computations = read_hlo(HLO)
    main = computations["main"]
    moved = {name: hbm_bytes(op, main, computations) for name, op in main.items()}
    assert {name: size for name, size in moved.items() if size} == {
        "near": 64 * 8 * 2,  # from HBM to VMEM
        "k.1": 64 * 8 * 4 + 8 * 2,  # its other operand and result are in VMEM
        "fusion.2": 8 * 4 + 8 * 2 + 8 * 2,  # a row read of the table, x, a row written of the result
    }
    assert main["k.1"].is_pallas and main["k.1"].vmem_bytes == 4096


def test_shapes():
    text = "%f (p: pred[3]) -> pred[3] {\n  %p = (pred[3]{0}, f8e4m3fn[2,5]{1,0}, s4[3]{0}, f32[]) parameter(0)\n}"
    assert [size for size, _ in read_hlo(text)["f"]["p"].arrays] == [3, 10, 2, 4]
    assert np.prod([in_hbm for _, in_hbm in read_hlo(text)["f"]["p"].arrays]) == 1


def test_a_comment_of_several_lines_with_names_inside():
    text = """     0   :  { %s1_s0 = smov 3 }
   0x1   :  { %2 = dma.hbm_to_vmem [thread:$0]  (%p3_p0), /*hbm=*/%s4_s1, /*steps_per_stride=*/%s5_s2 /*
dynamic_base_bounds: (%s6 = scalar_select /*predicate=*/%p7, /*on_true=*/0, 1)
strides: (1, 16) */ } /* Start region 0 */
   0x2   :  {}
"""
    first, second, third = read_bundles(text)
    assert first == "%s1_s0 = smov 3" and second.endswith("%s4_s1, %s5_s2") and third == ""
