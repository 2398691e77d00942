"""Bundles of every stage of the decode kernel, found in the schedule of a compiled program.

The kernel is one loop over the layers, with a branch for each kind of mixer and channels and for what begins a block.
Branches depend on a table in scalar memory, so `bundles.execute` counts all of them, in every layer; here they are told
apart. Inside of one, what sends to the last of the peers ends a stage. Copies are known by their sizes, the exchange
that a wait is for by the place of its semaphore.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pallas_kernels.common.bundles import execute, loops, read_bundles
from pallas_kernels.common.dump import FINAL, PACKED, Dump, DumpError
from pallas_kernels.common.hlo import FREE, Op, read_hlo
from pallas_kernels.common.schedule import BRANCH_DELAY, issued_of
from pallas_kernels.decode.ledger import padded_bytes
from pallas_kernels.decode.plan import Plan
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

GRANULE = 32  # bytes that copies are counted in
_COPY = re.compile(r"= dma\.(?:general|hbm_to_vmem)\b[^;]*?, (\d+), ")
_WAIT = re.compile(r"= dma\.done\.wait (?:%\w+|\[#allocation\d+(?: \+ \$(0x[0-9a-f]+))?\]), (\d+)")
Span = tuple[int, int]


@dataclass(frozen=True)
class Code:
    """The kernel's bundles: text, which are executed (`issued`, 0 or 1) and how often, and the loops among them."""

    text: list[str]
    issued: np.ndarray
    counts: np.ndarray
    loops: tuple[Span, ...]
    undecided: tuple[Span, ...]

    @property
    def static(self) -> int:
        return int(self.issued.sum())

    def executed(self, span: Span) -> float:
        return float(self.counts[slice(*span)] @ self.issued[slice(*span)])

    def copies(self, span: Span, size: int) -> list[int]:
        """Bundles that start copies of so many bytes; one that starts two stands twice."""
        found = ((i, _COPY.findall(self.text[i])) for i in range(*span))
        return [i for i, sizes in found for x in sizes if int(x) * GRANULE == size]

    def wait(self, span: Span, size: int, number: int | None = None) -> int:
        """The first bundle that waits for so many bytes, at semaphore `number` of an array. Raises DumpError."""
        for i in range(*span):
            for place, granules in _WAIT.findall(self.text[i]):
                if int(granules) * GRANULE == size and number in (None, int(place or "0", 16)):
                    return i
        raise DumpError(f"no wait for {size} bytes at semaphore {number} in bundles {span[0]} to {span[1]}")

    def inside(self, span: Span) -> list[Span]:
        """The outermost loops of a span."""
        return outermost([x for x in self.loops if span[0] <= x[0] and x[1] <= span[1]])


def outermost(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for span in sorted(spans, key=lambda x: (x[0], -x[1])):
        if not found or span[0] >= found[-1][1]:
            found.append(span)
    return found


def kernel(dump: Dump) -> Op:
    """The one Pallas call of the program. Raises DumpError if there are more, or none."""
    found = [op for computation in read_hlo(dump.hlo).values() for op in computation.values() if op.is_pallas]
    if len(found) != 1:
        raise DumpError(f"{len(found)} Pallas calls in the program: expected one")
    return found[0]


def label(dump: Dump) -> str:
    name = kernel(dump).name
    return dump.label_of_op().get(name, name)


def read_code(dump: Dump) -> Code:
    name, delay = label(dump), BRANCH_DELAY[dump.chip.name]
    packed = read_bundles(dump.text(name, PACKED))
    execution = execute(packed, delay)
    issued = issued_of(packed, read_bundles(dump.text(name, FINAL)))
    undecided = tuple(sorted(execution.undecided))
    return Code(packed, issued, np.array(execution.counts), tuple(loops(packed, delay)), undecided)


def stage_bundles(code: Code, plan: Plan) -> dict[str, StageBundles]:
    """By name of stage. Raises DumpError if the program is not built as the plan says."""
    layers = len(plan.config.layers)
    body = _layer_loop(code, layers)
    spans = outermost([x for x in code.undecided if body[0] <= x[0] and x[1] <= body[1]])
    if len(spans) != 5:
        raise DumpError(f"{len(spans)} branches in a layer: expected five, of two mixers, a block and two channels")
    *mixers, block, dense, moe = spans
    middle = block[1], dense[0]
    parts = (*mixers, middle, dense, moe)
    stages = (*(mixer_stages(plan, x) for x in (False, True)), sum_stages(plan))
    stages = (*stages, *(channel_stages(plan, x) for x in (False, True)))
    common = code.executed(body) - sum(map(code.executed, (*spans, middle)))
    found = {
        EMBED: StageBundles(code.executed((0, body[0]))),
        HEAD: StageBundles(code.executed((body[1], len(code.text)))),
        MIX: StageBundles(common / layers),
        START_BLOCK: StageBundles(code.executed(block) / layers),
    }
    for span, of_part in zip(parts, stages, strict=True):
        cuts = zip(of_part, _cut(code, plan, span, of_part), strict=True)
        found |= {stage.name: _stage(code, plan, stage, at) for stage, at in cuts}
    return found


def _layer_loop(code: Code, layers: int) -> Span:
    """The longest of the loops with as many steps as layers."""
    found = [x for x in code.inside((0, len(code.text))) if code.counts[x[0]] == layers]
    if not found:
        raise DumpError(f"no loop of {layers} steps: expected one over the layers")
    return max(found, key=code.executed)


def _cut(code: Code, plan: Plan, span: Span, stages: tuple[Stage, ...]) -> list[Span]:
    """The spans of the stages of a branch."""
    spans, start = [], span[0]
    for stage in stages:
        end = span[1]
        if stage.ends:
            peers = plan.config.ranks - 1
            sent = code.copies((start, span[1]), _place_bytes(plan, stage.ends))
            if len(sent) < peers:
                raise DumpError(f"{stage.name}: {len(sent)} copies to other ranks: expected {peers}")
            end = sent[peers - 1] + 1
        spans.append((start, end))
        start = end
    return spans


def _place_bytes(plan: Plan, exchange: str) -> int:
    return padded_bytes(plan.exchange_buffers[exchange]) // plan.exchange_buffers[exchange].shape[0]


def _stage(code: Code, plan: Plan, stage: Stage, span: Span) -> StageBundles:
    layers, c, start = len(plan.config.layers), plan.config, span[0]
    if stage.awaits:
        size = (c.ranks - 1) * _place_bytes(plan, stage.awaits)
        start = code.wait(span, size, list(plan.exchanges).index(stage.awaits))
    during, total = code.executed((span[0], start)) / layers, code.executed((start, span[1])) / layers
    if stage.experts:
        choices, record = c.rows * c.moe.top_k, 4 * plan.record.shape[0] * plan.record.shape[1]
        issued, expected = code.copies((start, span[1]), record), min(c.blocks.expert_slots, choices)
        if len(issued) < expected:
            raise DumpError(f"{stage.name}: {len(issued)} copies of experts: expected {expected}")
        fetched = issued[expected - 1] + 1
        come = code.wait((fetched, span[1]), record)
        first, once = code.executed((start, fetched)) / layers, code.executed((fetched, come)) / layers
        return StageBundles(once, during, first, expert=(total - first - once) / choices)
    if stage.attention:
        tiles = [x for x in code.inside((start, span[1])) if x in code.undecided]
        if len(tiles) != c.rows:
            raise DumpError(f"{stage.name}: {len(tiles)} loops over the cache: expected {c.rows}, one per row")
        each = sum(map(code.executed, tiles)) / layers
        return StageBundles(total - each, during, tile=each / c.rows)
    return StageBundles(total, during)


def weight_sized_copies(dump: Dump, plan: Plan) -> int:
    """Operations besides the kernel that write to HBM an array as large as one of the weights, or larger than every
    cache."""
    logical = lambda arrays: {x.size * x.dtype.itemsize for x in arrays.values()}  # noqa: E731
    caches = logical(plan.caches)
    weights = logical(plan.weights) - caches  # `heads` of one row are as large as convolutions' histories, copied once
    ops = [op for inside in read_hlo(dump.hlo).values() for op in inside.values()]
    # What an asynchronous start names is written by its -done.
    ops = [op for op in ops if op.opcode not in FREE and not op.is_pallas and not op.opcode.endswith("-start")]
    written = [size for op in ops for size, in_hbm in op.arrays if in_hbm]
    return sum(size in weights or size > max(caches) for size in written)
