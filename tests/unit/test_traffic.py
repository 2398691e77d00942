"""Collectives of HLO text: mesh axes in every notation of device groups, bytes, how often loops run them."""

import pytest

from pallas_kernels.common.hlo import read_hlo
from pallas_kernels.common.traffic import Collective, axes_of, collectives

MESH = {"data": 1, "fsdp": 4, "expert": 2, "context": 2}  # device = 4 fsdp + 2 expert + context
GROUPS = {
    "replica_groups={{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}": ("fsdp",),
    "replica_groups={{0,2},{1,3},{4,6},{5,7},{8,10},{9,11},{12,14},{13,15}}": ("expert",),
    "replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}": ("expert", "context"),
    "replica_groups={}": ("fsdp", "expert", "context"),
    "replica_groups=[8,2]<=[16]": ("context",),
    "replica_groups=[4,4]<=[4,4]T(1,0), use_global_device_ids=true": ("fsdp",),
    "replica_groups=[8,2]<=[4,2,2]T(0,2,1)": ("expert",),
    "replica_groups=mesh['data'=1,'fsdp'=4,'expert'=2,'context'=2] {'fsdp','context'}": ("fsdp", "context"),
    "replica_groups=mesh['axis_0'=4,'axis_1'=4] {'axis_1':(1)2}": ("expert",),
    "replica_groups=mesh['axis_0'=16] {'axis_0'}, channel_id=3": ("fsdp", "expert", "context"),
    "source_target_pairs={{0,1},{1,0},{2,3},{3,2}}": ("context",),
}


def op_of(groups: str):
    text = f"%main (a: f32[8]) -> f32[8] {{\n  ROOT %x.1 = f32[8]{{0}} all-reduce(%a), {groups}\n}}\n"
    return read_hlo(text)["main"]["x.1"]


@pytest.mark.parametrize("groups", GROUPS)
def test_axes(groups):
    assert axes_of(op_of(groups), MESH) == GROUPS[groups]


TEXT = """\
HloModule m, is_scheduled=true

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%x, %y)
}

%offloaded (p: f32[100]) -> f32[400] {
  %p = f32[100]{0} parameter(0)
  ROOT %all-gather.1 = f32[400]{0} all-gather(%p), replica_groups=[4,4]<=[4,4]T(1,0), dimensions={0}
}

%below_three (i: (s32[], f32[100])) -> pred[] {
  %constant.1 = s32[] constant(3)
  %i = (s32[], f32[100]) parameter(0)
  %gte.1 = s32[] get-tuple-element(%i), index=0
  ROOT %compare.1 = pred[] compare(%gte.1, %constant.1), direction=LT
}

%body (q: (s32[], f32[100])) -> (s32[], f32[100]) {
  %q = (s32[], f32[100]) parameter(0)
  %gte.2 = f32[100]{0} get-tuple-element(%q), index=1
  %all-reduce.1 = f32[100]{0} all-reduce(%gte.2), replica_groups=[8,2]<=[16], to_apply=%sum
  %start.1 = () call-start(), async_execution_thread="sparsecore", to_apply=%offloaded
  %update.1 = ((f32[100]{0}), f32[400]{0}) call-update(%start.1, %gte.2)
  %done.1 = f32[400]{0} call-done(%update.1)
  ROOT %tuple.1 = (s32[], f32[100]) tuple(%q, %all-reduce.1)
}

ENTRY %main (a: (s32[], f32[100]), b: f32[100]) -> f32[25] {
  %a = (s32[], f32[100]) parameter(0)
  %b = f32[100]{0} parameter(1)
  %ragged.1 = f32[300]{0} ragged-all-to-all(%b, %a), replica_groups=[8,2]<=[4,2,2]T(0,2,1)
  %while.1 = (s32[], f32[100]) while(%a), condition=%below_three, body=%body
  ROOT %reduce-scatter.1 = f32[25]{0} reduce-scatter(%b), replica_groups=[4,4]<=[4,4]T(1,0), to_apply=%sum
}
"""


def test_loops_multiply_and_bytes_are_those_sent():
    assert collectives(TEXT, MESH) == [
        Collective("ragged-all-to-all", ("expert",), 400, 1, False),  # as much as it has, not as there is room for
        Collective("all-reduce", ("context",), 400, 3, False),
        Collective("all-gather", ("fsdp",), 1200, 3, True),
        Collective("reduce-scatter", ("fsdp",), 300, 1, False),
    ]
