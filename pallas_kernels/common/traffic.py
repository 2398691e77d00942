"""The collectives of a compiled program: kind, mesh axes, bytes, and how often loops run them.

Bytes are what one device sends, from the sizes of operands and results: (n - 1) / n of a whole array in a gather, a
scatter or an exchange among n devices, twice that in an all-reduce, all of it in a permutation. Of a ragged exchange
only the most that its buffers hold is known.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pallas_kernels.common.aot import COLLECTIVES
from pallas_kernels.common.hlo import Computation, Op, read_hlo

_NAMED = re.compile(r"mesh\[([^\]]*)\](?:\([^)]*\))? ?\{([^}]*)\}")  # mesh['fsdp'=16,'expert'=64] {'expert'}
_IOTA = re.compile(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")  # [64,16]<=[16,64]T(1,0)
_LISTED = re.compile(r"\{\{([\d,]*)\}")  # {{0,1},{2,3}}; of pairs too


@dataclass(frozen=True)
class Collective:
    """`times` is how often a step runs it. `asynchronous`: something may run beside it."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    times: int
    asynchronous: bool


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Those of HLO text, for a mesh of these axis sizes in the order of its devices."""
    computations = read_hlo(text)
    (entry,) = re.findall(r"^ENTRY %([\w.\-]+) ", text, re.MULTILINE)
    return [
        Collective(kind_of(op), axes_of(op, mesh), sent(op, inside, mesh), times, asynchronous)
        for op, inside, times, asynchronous in _walk(computations[entry], computations, 1, False)
    ]


def kind_of(op: Op) -> str | None:
    """The kind of collective that an op is or starts, else None."""
    kind = op.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _walk(
    inside: Computation, computations: Mapping[str, Computation], times: int, asynchronous: bool
) -> Iterator[tuple[Op, Computation, int, bool]]:
    for op in inside.values():
        if kind_of(op):
            yield op, inside, times, asynchronous or op.opcode.endswith("-start")
        elif not op.opcode.endswith(("-done", "-update")):
            runs = times * trips(op, computations)
            for name in re.findall(
                r"(?:calls=|body=|to_apply=|_computation=|branch_computations=\{|, )%([\w.\-]+)", op.rest
            ):
                if name in computations:
                    yield from _walk(computations[name], computations, runs, op.opcode.endswith("-start"))


def trips(op: Op, computations: Mapping[str, Computation]) -> int:
    """How often a loop runs: the one constant that its condition compares with; 1 if there is no such constant."""
    if op.opcode != "while":
        return 1
    condition = computations.get(re.search(r"condition=%([\w.\-]+)", op.rest)[1], {})
    counts = [int(x.operands[0]) for x in condition.values() if x.opcode == "constant" and x.operands[0].isdigit()]
    return counts[0] if len(counts) == 1 else 1


def axes_of(op: Op, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that the devices of one group differ in."""
    group = _group(op.rest, math.prod(mesh.values()))
    places = np.array(np.unravel_index(group, tuple(mesh.values())))
    return tuple(axis for axis, index in zip(mesh, places, strict=True) if len(set(index.tolist())) > 1)


def _group(text: str, devices: int) -> np.ndarray:
    """The first group of devices of an op; of a permutation the first pair."""
    found = re.search(r"(?:replica_groups|source_target_pairs)=(.*)", text)
    groups = found[1] if found else ""
    if named := _NAMED.match(groups):
        return _named_group(*named.groups())
    if iota := _IOTA.match(groups):
        count, size, dims, order = iota.groups()
        grid = np.arange(devices).reshape([int(x) for x in dims.split(",")])
        grid = grid.transpose([int(x) for x in order.split(",")]) if order else grid
        return grid.reshape(int(count), int(size))[0]
    listed = _LISTED.match(groups)
    return np.array([int(x) for x in listed[1].split(",")]) if listed else np.arange(devices)


def _named_group(sizes: str, chosen: str) -> np.ndarray:
    """Of a mesh with named axes; 'a':(4)16 are the 16 places of axis a after the first 4."""
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    grid = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
    index = dict.fromkeys(axes, slice(0, 1))
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        step = axes[name] // (int(before) * int(size)) if size else 1
        index[name] = slice(0, int(size) * step if size else None, step)
    return grid[tuple(index.values())].reshape(-1)


def group_size(op: Op, mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes_of(op, mesh))


def sent(op: Op, inside: Computation, mesh: Mapping[str, int]) -> int:
    """Bytes that one device sends in one execution."""
    n, kind = group_size(op, mesh), kind_of(op)
    result = max(size for size, _ in op.arrays) if op.opcode.endswith("-start") else op.size()
    operand = sum(inside[name].size() for name in op.operands if name in inside)
    match kind:
        case "ragged-all-to-all":
            return min(inside[op.operands[0]].size(), result)
        case "collective-permute" | "collective-broadcast":
            return result
        case "all-reduce":
            return 2 * operand * (n - 1) // n
        case "reduce-scatter" | "all-to-all":
            return operand * (n - 1) // n
    return result * (n - 1) // n
