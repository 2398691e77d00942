"""What the HLO text of a compiled TPU program says about its ops: kind, VMEM, bytes through HBM.

    %walk.1 = f32[256,256]{1,0:T(8,128)S(1)} custom-call(%copy-done), custom_call_target="tpu_custom_call", ...

An array whose layout ends in S(n) is not in HBM (S(1) is VMEM). Sizes are logical, without the padding of tiles.
"""

import dataclasses
import math
import re
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](?:\{([^}]*)\})?")
_BITS = re.compile(r"[a-z]+(\d+)")
# They move nothing themselves. A start of something asynchronous moves what its result names.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
_SLICES = {"dynamic-slice", "slice"}
_GROUPED = "ragged-dot-none"  # XLA's kernel
_STATED = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')


@dataclass(frozen=True)
class Op:
    """One HLO instruction. `arrays` are those of its result: bytes, and whether they are in HBM; `dims` their sizes.
    `rest` is what follows the operands. The one operand of a parameter is its number, that of a constant its value.
    """

    name: str
    opcode: str
    operands: tuple[str, ...]
    arrays: tuple[tuple[int, bool], ...]
    dims: tuple[tuple[int, ...], ...]
    root: bool
    rest: str

    @property
    def is_pallas(self) -> bool:
        return 'custom_call_target="tpu_custom_call"' in self.rest

    @property
    def vmem_bytes(self) -> int:
        """VMEM that the op uses while it runs, as the compiler reserved it."""
        used = re.search(r'"used_scoped_memory_configs":\[([^\]]*)\]', self.rest)
        sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1]) if used else []
        return sum(map(int, sizes))

    def size(self, hbm_only: bool = False) -> int:
        return sum(size for size, in_hbm in self.arrays if in_hbm or not hbm_only)


Computation = dict[str, Op]


def read_hlo(text: str) -> dict[str, Computation]:
    """The computations of HLO text and their ops, both by name."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[1], {})
        elif op := _INSTRUCTION.match(line):
            root, name, shape, opcode, operands, rest = op.groups()
            names = (operands,) if opcode in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", operands))
            current[name] = Op(name, opcode, names, _arrays(shape), _dims(shape), bool(root), rest)
    return computations


def _dims(shape: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in sizes.split(",") if size) for _, sizes, _ in _ARRAY.findall(shape))


def _arrays(shape: str) -> tuple[tuple[int, bool], ...]:
    """Bytes of every array of a shape, and whether it is in HBM."""
    found = []
    for dtype, sizes, layout in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int(_BITS.match(dtype)[1])
        count = math.prod(int(size) for size in sizes.split(",") if size)
        found.append(((count * bits + 7) // 8, not re.search(r"S\(\d+\)", layout)))
    return tuple(found)


def hbm_bytes(op: Op, inside: Computation, computations: dict[str, Computation]) -> int:
    """Bytes that one execution of an op of the computation `inside` reads from and writes to HBM.

    Every operand and result counts whole, except where a fusion only slices an operand or updates a slice of it.
    """
    if op.opcode in FREE or op.opcode.endswith("-done") or "AllocateBuffer" in op.rest:
        return 0
    if op.opcode.endswith(("-start", "-update")):
        return op.size(hbm_only=True)
    fused = computations[_called(op)] if op.opcode == "fusion" else _alone(op, inside)
    pairs = zip(op.operands, _parameters(fused), strict=True)
    read = sum(_bytes_read(x, fused, computations) for name, x in pairs if inside[name].size(hbm_only=True))
    return read + _bytes_written(op, fused)


def flops(op: Op, inside: Computation, computations: dict[str, Computation]) -> int:
    """Of the matrix products in an op of the computation `inside`; of a Pallas kernel what its call states."""
    if op.opcode == "fusion":
        fused = computations[_called(op)]
        return sum(flops(x, fused, computations) for x in fused.values())
    if stated := _STATED.search(op.rest):
        return int(stated[1])
    if op.name.startswith(_GROUPED):
        return _grouped_flops(op, inside)
    if op.opcode not in ("convolution", "dot"):
        return 0
    left, right = (inside[name].dims[0] for name in op.operands[:2])
    if op.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)[1]
        return 2 * math.prod(op.dims[0]) * math.prod(left[int(i)] for i in contracted.split(",") if i)
    labels = re.search(r"dim_labels=\w+_(\w+)->", op.rest)[1]  # "io": matrices; digits are batches of them
    return 2 * math.prod(op.dims[0]) * right[labels.index("i")]


def _grouped_flops(op: Op, inside: Computation) -> int:
    """[n, A] x [G, A, C] -> [n, C], or [n, A] x [n, C] by groups -> [G, A, C]."""
    dims = [x.dims[0] for x in (op, *(inside[name] for name in op.operands)) if x.dims]
    rows = max(d[0] for d in dims if len(d) == 2)
    _, A, C = next(d for d in dims if len(d) == 3)
    return 2 * rows * A * C


def _called(op: Op) -> str:
    return re.search(r"calls=%([\w.\-]+)", op.rest)[1]


def _parameters(fused: Computation) -> list[Op]:
    return sorted((x for x in fused.values() if x.opcode == "parameter"), key=lambda x: int(x.operands[0]))


def _alone(op: Op, inside: Computation) -> Computation:
    """A computation of one op, as if it were a fusion."""
    names = tuple(f"parameter.{i}" for i in range(len(op.operands)))
    parameters = {
        name: Op(name, "parameter", (str(i),), inside[operand].arrays, inside[operand].dims, False, "")
        for i, (name, operand) in enumerate(zip(names, op.operands, strict=True))
    }
    return parameters | {op.name: dataclasses.replace(op, operands=names, root=True)}


def _bytes_read(value: Op, fused: Computation, computations: dict[str, Computation]) -> int:
    """All of a value, unless its users only slice it or replace a slice of it."""
    read = 0
    for user in (x for x in fused.values() if value.name in x.operands and x.opcode != "parameter"):
        if user.opcode in _SLICES and user.operands[0] == value.name:
            read += user.size()
        elif user.opcode == "bitcast" or (user.opcode == "fusion" and len(user.operands) == 1):  # another view of it
            read += _bytes_read(user, fused, computations)
        elif user.opcode == "fusion":
            inner = computations[_called(user)]
            read += _bytes_read(_parameters(inner)[user.operands.index(value.name)], inner, computations)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != value.name:
            return value.size()
    return value.size() if value.root else min(read, value.size())


def _bytes_written(op: Op, fused: Computation) -> int:
    """Those of the results that are in HBM; of a result that is an update in place, the update's."""
    (root,) = (x for x in fused.values() if x.root)
    results = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    if len(results) != len(op.arrays):  # one op with several results
        return op.size(hbm_only=True)
    return sum(_update_size(result, fused) for result, (_, in_hbm) in zip(results, op.arrays, strict=True) if in_hbm)


def _update_size(op: Op, fused: Computation) -> int:
    while op.opcode == "bitcast":
        op = fused[op.operands[0]]
    return fused[op.operands[1]].size() if op.opcode == "dynamic-update-slice" else op.size()
