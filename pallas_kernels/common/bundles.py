"""How often each bundle of a compiled TPU program is executed, found by following its control flow.

libtpu writes its schedule as text: a VLIW bundle per line, the scalar code in clear.

    0x23   : > { %157 = sbr.rel (%p154_p9) target bundleno = 166 (0xa6), region = 43  ;;  %s9_s3 = sand.u32 1, %s8_s0 }

A Pallas grid is one software-pipelined loop whose branches depend on counters, so interpreting the few scalar
instructions that branches depend on tells which regions run in which step. A branch that depends on data falls through,
that is, the region behind it is counted; `Execution.undecided` says where that was.
"""

import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MAX_VISITS = 10_000_000  # of blocks in one program, some ten seconds
Value = int | bool | None  # None is unknown

_CORE = re.compile(r"sld \[smem:[^\]]*\]\] /\* megacore core id")  # of two cores in one device: we follow core 0
_CALL = re.compile(r"inlined_call\b[^/]*/\* %([\w.\-]+) = ")
_NAME = re.compile(r"/\*\w+=\*/")  # of an operand; stands inside of other comments too
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*>*\s*\{(.*)\}\s*$", re.MULTILINE)
_CELL = re.compile(r"\[smem:\[([^\]]*)\]\]")
_SCALAR = re.compile(r"%(\w+) = (s\w+|p\w+)((?:\.\w+)*) (.*)")
_VECTOR = re.compile(r"= v[a-z]")
_BY_VALUE = re.compile(r"%(\w+) = inlined_call_operand\.<no memory space>")  # a grid's length that is an operand
_GUARD = re.compile(r"\((!?)%(\w+)(?:, %?([\w-]+))?\)")


class Instruction(NamedTuple):
    """`dest = op operands`, where the predicate `guard` has the value `expected`; elsewhere dest is `otherwise`.

    Operands are names or decimal numbers. A cell of scalar memory is a name too: "smem:#allocation40_spill".
    """

    op: str
    dest: str
    operands: tuple[str, ...]
    guard: str | None = None
    expected: bool = True
    otherwise: str | None = None


class Block(NamedTuple):
    """Bundles start to end - 1, how many vector instructions they hold, the scalar instructions that matter, and the
    branch that takes effect at the end.
    """

    start: int
    end: int
    vectors: int
    phis: list[Instruction]
    instructions: list[Instruction]
    branch: Instruction | None


@dataclass(frozen=True)
class Execution:
    """What `execute` found, per bundle in the order of the text.

    counts      executions in the whole program.
    steady      executions in one iteration of the main loop, on the path that most iterations take.
    steps       how often most vector instructions of that path are executed: the steps of the grid. The loop has more
                iterations, to fill and drain its pipeline. 1 where there is no loop.
    undecided   spans [first, last + 1) counted although a branch around them depends on data. A loop among them has an
                unknown trip count and is counted once.
    """

    counts: list[int]
    steady: list[int]
    steps: int
    undecided: frozenset[tuple[int, int]]


def read_bundles(text: str) -> list[str]:
    """The bundles of a `packed-bundles` or `final_bundles` dump: instructions separated by `;;`, empty for a wait."""
    return [bundle.strip() for bundle in _BUNDLE.findall(_COMMENT.sub("", _NAME.sub("", _CORE.sub("smov 0 /*", text))))]


def called_ops(text: str) -> list[list[str]]:
    """The HLO ops that each bundle of a top-level program calls."""
    marked = _CALL.sub(r"inlined_call @\1 /* ", text)
    return [re.findall(r"inlined_call @([\w.\-]+)", bundle) for bundle in read_bundles(marked)]


def execute(bundles: list[str], branch_delay: int, table: int | None = None, length: int | None = None) -> Execution:
    """Follow a program from its first bundle to its end.

    `branch_delay` is the number of bundles executed behind a branch before it takes effect. `table` is the value
    assumed for every word of scalar memory that the program only reads (scalar-prefetch operands), `length` that of
    scalars which are operands themselves (lengths of grids); None leaves them unknown. Raises ValueError for a program
    that runs too long to follow.
    """
    lengths = dict.fromkeys((name for bundle in bundles for name in _BY_VALUE.findall(bundle)), length)
    return _Interpreter(_blocks(bundles, branch_delay), table, lengths).run()


def loops(bundles: list[str], branch_delay: int) -> list[tuple[int, int]]:
    """Spans [first, last + 1) of all loops, in order; those that are inside of others too."""
    blocks = _blocks(bundles, branch_delay)
    return sorted((_target(b.branch), b.end) for b in blocks if b.branch and _target(b.branch) <= b.start)


# Reading


def _scalar_instructions(bundle: str) -> list[Instruction]:
    """Those of a bundle that write scalars, predicates or scalar memory, or branch; stores last, as they act last."""
    parts = _CELL.sub(lambda cell: _cell_name(cell[1]), bundle).split(";;")
    found = [_instruction(*match.groups()) for part in parts if (match := _SCALAR.match(part.strip()))]
    return sorted(found, key=lambda instruction: instruction.op == "sst")


def _cell_name(address: str) -> str:
    return "smem:?" if "%" in address else "smem:" + address.replace(" ", "")


def _instruction(dest: str, op: str, kind: str, rest: str) -> Instruction:
    guard = _GUARD.search(rest)
    condition = (guard[2], not guard[1], guard[3]) if guard else (None, True, None)
    operands = tuple(re.findall(r"[^\s,%]+", _GUARD.sub("", rest)))
    if op == "sbr":
        return Instruction(op, "", (operands[operands.index("bundleno") + 2],), *condition)
    if op == "sst":
        return Instruction(op, operands[0], operands[1:], *condition[:2], otherwise=operands[0])
    return Instruction(op + kind.removesuffix(".totalorder"), dest, operands, *condition)


# Control flow


def _blocks(bundles: list[str], branch_delay: int) -> list[Block]:
    """Cuts a program where branches take effect and where they lead."""
    program = [_scalar_instructions(bundle) for bundle in bundles]
    branches = {i + branch_delay + 1: x for i, bundle in enumerate(program) for x in bundle if x.op == "sbr"}
    needed = _needed_names(program, {x.guard for x in branches.values() if x.guard})
    cuts = sorted({0, len(program), *branches, *(_target(x) for x in branches.values())})
    blocks = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        inside = [x for bundle in program[start:end] for x in bundle if x.dest in needed]
        phis, others = [x for x in inside if x.op == "sphi"], [x for x in inside if x.op != "sphi"]
        vectors = sum(len(_VECTOR.findall(bundle)) for bundle in bundles[start:end])
        blocks.append(Block(start, end, vectors, phis, others, branches.get(end)))
    return blocks


def _target(branch: Instruction) -> int:
    return int(branch.operands[0])


def _needed_names(program: list[list[Instruction]], names: set[str]) -> set[str]:
    """The names that the given ones depend on, themselves included."""
    sources: dict[str, set[str]] = {}
    for x in (x for bundle in program for x in bundle):
        sources.setdefault(x.dest, set()).update(y for y in (*x.operands, x.guard, x.otherwise) if y)
    needed, queue = set(), list(names)
    while queue:
        name = queue.pop()
        if name not in needed:
            needed.add(name)
            queue.extend(sources.get(name, ()))
    return needed


def _outer_loops(blocks: list[Block]) -> set[int]:
    """First bundles of the loops that are in no other loop."""
    loops = sorted({(_target(b.branch), -b.end) for b in blocks if b.branch and _target(b.branch) <= b.start})
    heads, covered = set(), 0
    for head, end in loops:
        if head >= covered:
            heads.add(head)
            covered = -end
    return heads


class _Interpreter:
    """Runs the blocks of one program and counts; `paths` are the iterations of each outer loop, as visits of blocks."""

    def __init__(self, blocks: list[Block], table: int | None, lengths: dict[str, int | None]):
        self.blocks, self.index = blocks, {block.start: i for i, block in enumerate(blocks)}
        self.heads = {self.index[head] for head in _outer_loops(blocks)}
        self.values: dict[str, Value] = {}
        for x in (x for block in blocks for x in (*block.phis, *block.instructions)):
            for name in (*x.operands, x.otherwise or ""):
                self.values[name] = lengths[name] if name in lengths else _initial(name, table)
        self.visits = [0] * len(blocks)
        self.paths: dict[int, Counter[frozenset[tuple[int, int]]]] = {}
        self.undecided: set[tuple[int, int]] = set()

    def run(self) -> Execution:
        position, from_behind, head, iteration = 0, False, None, Counter()
        for _ in range(MAX_VISITS):
            if position in self.heads or position == len(self.blocks):
                if head is not None:
                    self.paths.setdefault(head, Counter())[frozenset(iteration.items())] += 1
                head, iteration = position, Counter()
            if position == len(self.blocks):
                return self._execution()
            self.visits[position] += 1
            iteration[position] += 1
            following = self._run_block(self.blocks[position], from_behind)
            position, from_behind = following, following <= position
        raise ValueError(f"a program of {self.blocks[-1].end} bundles is still running after {MAX_VISITS} blocks")

    def _run_block(self, block: Block, from_behind: bool) -> int:
        """Executes a block and returns the index of the next one."""
        get = self.values.get
        self.values.update([(x.dest, get(x.operands[-1 if from_behind else 0])) for x in block.phis])
        for x in block.instructions:
            holds = True if x.guard is None or x.otherwise is None else _agrees(get(x.guard), x.expected)
            value = _evaluate(x.op, [get(name) for name in x.operands]) if holds is not False else get(x.otherwise)
            self.values[x.dest] = None if holds is None else value
        following = self.index.get(block.end, len(self.blocks))
        if block.branch is None:
            return following
        taken = True if block.branch.guard is None else _agrees(get(block.branch.guard), block.branch.expected)
        target = _target(block.branch)
        if taken is None:
            self.undecided.add((min(block.end, target), max(block.end, target)))
        return self.index[target] if taken else following

    def _execution(self) -> Execution:
        counts = self._per_bundle(dict(enumerate(self.visits)))
        if not self.paths:
            return Execution(counts, counts, 1, frozenset(self.undecided))
        length = [block.end - block.start for block in self.blocks]
        size = lambda path: sum(length[i] * n for i, n in path)  # noqa: E731
        main = max(self.paths.values(), key=lambda paths: sum(size(path) * n for path, n in paths.items()))
        path = dict(max(main, key=lambda path: (main[path], size(path))))
        return Execution(counts, self._per_bundle(path), self._steps(path), frozenset(self.undecided))

    def _steps(self, path: dict[int, int]) -> int:
        """How often most vector instructions of a path are executed: the code around them is in every iteration."""
        vectors, bundles = Counter(), Counter()
        for i, n in path.items():
            vectors[self.visits[i] // n] += self.blocks[i].vectors * n
            bundles[self.visits[i] // n] += (self.blocks[i].end - self.blocks[i].start) * n
        return max(bundles, key=lambda steps: (vectors[steps], bundles[steps]))

    def _per_bundle(self, visits: dict[int, int]) -> list[int]:
        return [visits.get(i, 0) for i, block in enumerate(self.blocks) for _ in range(block.start, block.end)]


# Arithmetic on values of which some are unknown


def _initial(name: str, table: int | None) -> Value:
    if re.fullmatch(r"-?\d+", name):
        return _wrap(int(name))
    return table if name.startswith("smem:") else None


def _wrap(value: int) -> int:
    """As a signed number of 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


def _agrees(value: Value, expected: bool) -> bool | None:
    return None if value is None else bool(value) == expected


def _unsigned(value: int) -> int:
    return value % 2**32


_ARITHMETIC: dict[str, Callable] = {
    "sadd.s32": operator.add,
    "ssub.s32": operator.sub,
    "smul.u32": operator.mul,
    "sshll.u32": lambda a, n: a << (n % 32),
    "sshra.s32": lambda a, n: a >> (n % 32),
    "sshrl.u32": lambda a, n: _unsigned(a) >> (n % 32),
    "sand.u32": operator.and_,
    "sor.u32": operator.or_,
    "sxor.u32": operator.xor,
}
_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _evaluate(op: str, values: list[Value]) -> Value:
    """The result of a scalar instruction; None where it or something that it depends on is not known."""
    name, _, kind = op.partition(".")
    if op in ("smov", "pmov", "sld", "sst"):
        return values[0]
    if op == "scalar_select":
        condition, yes, no = values
        return None if condition is None else yes if condition else no
    if name in ("por", "pand", "pnor", "pnand"):
        decisive = name in ("por", "pnor")  # one operand of this value is enough
        result = decisive if decisive in values else None if None in values else not decisive
        return result if result is None or name in ("por", "pand") else not result
    if any(value is None for value in values):
        return None
    if name == "pneg":
        return not values[0]
    if name == "scmp":
        comparison, _, unsigned = kind.partition(".")
        return _COMPARE[comparison](*(map(_unsigned, values) if unsigned == "u32" else values))
    return _wrap(_ARITHMETIC[op](*values)) if op in _ARITHMETIC else None
