"""What `k3 bench grouped` compiles: a rank's grouped products by our kernels, XLA's and JAX's; and what follows from
their schedules for given sizes of the groups."""

import functools
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jaxtyping import Int

from pallas_kernels.common import aot, tpu
from pallas_kernels.common.dump import Dump, compile_program
from pallas_kernels.common.schedule import Code, OpSchedule, Schedule, read_schedule
from pallas_kernels.grouped import grouped_matmul, grouped_outer, grouped_transposed
from pallas_kernels.grouped.pallas import DEEP_UNIT, FORWARD, TRANSPOSED, outer_parts, parts
from pallas_kernels.grouped.visits import Blocks, visits_of

Product = Literal["matmul", "transposed", "outer"]
OURS = {"matmul": grouped_matmul, "transposed": grouped_transposed, "outer": grouped_outer}
MEGABLOX_TILE = 512, 1024  # rows and columns: the best of those that fit into the VMEM that it asks for
LOWER = f"{__name__}:lower"
CUBE = 256  # of a block of product, on each side
# Rows that each matrix unit takes per cycle; so many slots of the schedule are used for a block. At 1.75, 1.75 and
# 2.2 GHz these are the vendor's peaks.
ROWS_PER_CYCLE = {"v5p": 1, "v6e": 2, "tpu7x": 2}
MXU_SLOTS = {"v5p": 1024, "v6e": 128, "tpu7x": 128}
LENGTH = 100  # assumed of grids whose length is an operand


@dataclass(frozen=True)
class Case:
    """R rows of G groups; products of [A, C] matrices."""

    R: int
    A: int
    C: int
    G: int

    @property
    def operations(self) -> int:
        return 2 * self.R * self.A * self.C


@dataclass(frozen=True)
class Kernel:
    """What the schedule says of one kernel. On a core its visits pass `cuts` times, over parts [a, c] of each group's
    matrix; where a device has two cores the schedule is that of the first, which has half of the parts.

    `cycles` are those of a visit whose rows are one window of so many units, 0: of a visit that computes nothing.
    `copied_bytes` are moved by other ops of the program, to bring operands into the form that it takes.
    """

    chip: tpu.Chip
    blocks: Blocks
    cuts: int
    part: tuple[int, int]
    cycles: dict[int, int]
    copied_bytes: int

    @property
    def peak_cycles(self) -> float:
        """The least that a whole block takes a core."""
        rows = self.chip.mxus_per_core * self.chip.mxu_size**2 * ROWS_PER_CYCLE[self.chip.name]
        return self.blocks.rows * self.part[0] * self.part[1] / rows

    @property
    def mxu_share(self) -> float:
        """Of the matrix units' peak, in visits of whole blocks."""
        return self.peak_cycles / self.cycles[self.blocks.windows[0]]

    @property
    def cycles_per_cube(self) -> float:
        """Of 256 x 256 x 256 of product, in visits of whole blocks."""
        cubes = self.blocks.rows * self.part[0] * self.part[1] / CUBE**3
        return self.cycles[self.blocks.windows[0]] / cubes

    def rows_and_seconds(self, sizes: Int[np.ndarray, "* G"], case: Case, product: Product) -> tuple[float, float]:
        """Rows computed and seconds taken, means over many sets of sizes."""
        least = 1 if product == "outer" else 0
        visits, count = _all_visits(sizes.reshape(-1, case.G), case.R, self.blocks, least)
        live = np.arange(visits.units.shape[1]) < np.asarray(count)[:, None]
        units = np.where(live, visits.units, 0)
        cycles = np.where(live, self.cycles[0], 0)
        for size in self.blocks.windows:
            cycles = cycles + np.where(units & size, self.cycles[size] - self.cycles[0], 0)
        clock = self.chip.bf16_flops / self.chip.cores * self.peak_cycles / (2 * self.blocks.rows * np.prod(self.part))
        seconds = cycles.sum(1) * self.cuts / clock
        moved = np.array([self.hbm_bytes(case, product, int(x)) for x in np.sum(sizes.reshape(-1, case.G) > 0, axis=1)])
        return units.sum(1).mean() * self.blocks.unit, float(
            np.maximum(seconds, moved / self.chip.hbm_bandwidth).mean()
        )

    def hbm_bytes(self, case: Case, product: Product, groups: int) -> int:
        """Of operands, read again for every part of the result, and results in float32; `groups` of them have rows."""
        (a, c), again = self.part, lambda width, part: -(-width // part)
        if product == "outer":
            return 2 * case.R * (case.A * again(case.C, c) + case.C * again(case.A, a)) + 4 * case.G * case.A * case.C
        return 2 * case.R * case.A * again(case.C, c) + 2 * groups * case.A * case.C + 4 * case.R * case.C


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _all_visits(sizes, R, blocks, least):
    return jax.vmap(lambda x: visits_of(x, R, blocks, least))(sizes)


def kernel(topology: str, case: Case, product: Product, competitor: str, target: str = LOWER) -> Kernel:
    """Compiled, never run; `target` lowers it. Raises DumpError where it does not compile or cannot be read."""
    arguments = {"topology": topology, "shape": [case.R, case.A, case.C, case.G]}
    arguments |= {"product": product, "competitor": competitor}
    with tempfile.TemporaryDirectory(prefix="k3-grouped-") as folder:
        compile_program(target, arguments, Path(folder), 1200)
        dump = Dump(Path(folder))
        schedule = read_schedule(dump, table=1, length=LENGTH)
        op = _largest(schedule)
        blocks, part = _tiles(dump, case, product, competitor, op.code)
        cycles = {0: 0, 1: op.code.step.cycles}
        if competitor == "pallas":
            for size in (0, *blocks.windows):
                cycles[size] = _largest(read_schedule(dump, size, LENGTH)).code.step.cycles
        return Kernel(dump.chip, blocks, op.code.steps // LENGTH, part, cycles, schedule.hbm_bytes - op.hbm_bytes)


def _largest(schedule: Schedule) -> OpSchedule:
    return max(schedule.pallas, key=lambda op: op.bundles)


def _tiles(dump: Dump, case: Case, product: Product, competitor: str, code: Code) -> tuple[Blocks, tuple[int, int]]:
    """Rows of a block, and the part of each group's matrix that stays."""
    match competitor:
        case "pallas":
            unit = DEEP_UNIT if product == "outer" else {"matmul": FORWARD, "transposed": TRANSPOSED}[product].unit
            blocks = Blocks.of(case.R, unit, dump.chip.device_kind)
            if product == "outer":
                return blocks, outer_parts(case.A, case.C, blocks.rows, 2)
            return blocks, (case.A, parts(case.A, case.C, blocks.rows, 2, 4))
        case "xla":
            rows, a, c = map(int, re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', dump.hlo).groups())
            return Blocks(rows, rows), (a, c)
        case "megablox":
            rows, c = MEGABLOX_TILE
            return Blocks(rows, rows), (case.A, c)
        case _:  # its own choice, read from what a step computes
            c = case.C * LENGTH // code.steps
            rows = round(code.step.slots["MXU"] / MXU_SLOTS[dump.chip.name] * CUBE**3 / (case.A * c))
            return Blocks(rows, rows), (case.A, c)


def lower(topology: str, shape: Sequence[int], product: Product, competitor: str) -> jax.stages.Lowered:
    """One product for one device of a TPU topology, in bfloat16 with a float32 result. `shape` is R, A, C, G; of
    "transposed" too A is the width that is contracted."""
    run = {"pallas": OURS.get, "xla": _ragged, "megablox": _megablox}[competitor]
    return lower_op(run(product), topology, shape, product)


def lower_op(op, topology: str, shape: Sequence[int], product: Product) -> jax.stages.Lowered:
    R, A, C, G = shape
    mesh = aot.mesh_for(topology, device=1)
    second = {"matmul": (G, A, C), "transposed": (G, C, A), "outer": (R, C)}[product]
    arguments = [aot.abstract(shape, jnp.bfloat16, mesh) for shape in ((R, A), second)]
    # Inside shard_map, where experts are: a mesh of one device has nothing to vary over.
    op = jax.shard_map(op, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    return aot.lower_for(op, *arguments, aot.abstract((G,), jnp.int32, mesh), mesh=mesh)


def _ragged(product: Product):
    if product != "outer":

        def op(x, w, sizes):
            w = jnp.swapaxes(w, 1, 2) if product == "transposed" else w
            return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)

        return op
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return lambda x, dy, sizes: jax.lax.ragged_dot_general(x, dy, sizes, numbers, preferred_element_type=jnp.float32)


def _megablox(product: Product):
    rows, columns = MEGABLOX_TILE
    return lambda x, w, sizes: gmm(
        x, w, sizes, tiling=(rows, x.shape[1], columns), transpose_rhs=product == "transposed"
    )
