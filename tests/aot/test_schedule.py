"""Schedules of small Pallas kernels whose work is known: grids, steady steps, loops of the program around them."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common import aot, tpu
from pallas_kernels.common.dump import Dump, DumpError, compile_program
from pallas_kernels.common.schedule import read_schedule, schedule_of, table_of

pytestmark = pytest.mark.aot_compile
TOPOLOGY = "tpu7x:2x2x1"
OUTER, INNER, ROWS, COLUMNS = 4, 16, 64, 256
REGISTERS = ROWS * COLUMNS // (8 * 128)  # of one block
SCAN = 5


def walk(x, flags, name, rounds, first=1):
    """The sum of tanh, applied `rounds` times to every block of a row, and `first` times to the first one once more.

    The last step writes tanh of tanh of it. Where a flag is set, a polynomial of the sum takes its place.
    """

    def kernel(flags_ref, x_ref, o_ref, total):
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _():
            total[...] = tanh(x_ref[...], first)

        @pl.when(flags_ref[step] > 0)
        def _():
            for _ in range(8):
                total[...] = total[...] * total[...] + 0.1

        total[...] += tanh(x_ref[...], rounds)

        @pl.when(step == INNER - 1)
        def _():
            o_ref[...] = tanh(total[...], 2)

    def tanh(value, times):
        for _ in range(times):
            value = jnp.tanh(value)
        return value

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(OUTER, INNER),
        in_specs=[pl.BlockSpec((ROWS, COLUMNS), lambda i, j, flags: (i, j))],
        out_specs=pl.BlockSpec((ROWS, COLUMNS), lambda i, j, flags: (i, 0)),
        scratch_shapes=[pltpu.VMEM((ROWS, COLUMNS), jnp.float32)],
    )
    out_shape = jax.ShapeDtypeStruct((OUTER * ROWS, COLUMNS), jnp.float32)
    return pl.pallas_call(kernel, out_shape=out_shape, grid_spec=grid_spec, name=name)(flags, x)


def lower_walks(topology: str) -> jax.stages.Lowered:
    def program(x, flags):
        repeat = lambda y, _: (walk(x + jnp.sum(y), flags, "repeated", rounds=2), None)  # noqa: E731
        single = walk(x, flags, "single", rounds=2)
        return (
            walk(x, flags, "double", rounds=4),
            walk(x, flags, "hard_start", rounds=2, first=20),
            jax.lax.scan(repeat, single, length=SCAN)[0],
        )

    mesh = aot.mesh_for(topology, device=1)
    x = aot.abstract((OUTER * ROWS, INNER * COLUMNS), jnp.float32, mesh)
    return aot.lower_for(program, x, aot.abstract((INNER,), jnp.int32, mesh), mesh=mesh)


def lower_too_large(topology: str) -> jax.stages.Lowered:
    """Needs more VMEM than there is."""
    mesh = aot.mesh_for(topology, device=1)
    copy = lambda x: pl.pallas_call(  # noqa: E731
        lambda x_ref, o_ref: pltpu.sync_copy(x_ref, o_ref), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
    )(x)
    return aot.lower_for(copy, aot.abstract((8192, 2048), jnp.float32, mesh), mesh=mesh)


def lower_walks_of_no_chip() -> jax.stages.Lowered:
    raise ValueError("chip = 'none':\nexpected another")


@pytest.fixture(scope="module", params=["v5p:2x2x1", "v6e:2x4", TOPOLOGY])
def compiled(tmp_path_factory, request) -> Dump:
    folder = tmp_path_factory.mktemp("dump")
    compile_program(f"{__file__}:lower_walks", {"topology": request.param}, folder, 300)
    assert Dump(folder).chip is tpu.chip(request.param)
    return Dump(folder)


@pytest.fixture(scope="module", params=[None, 0], ids=["flags_unknown", "flags_zero"])
def ops(compiled, request):
    """The Pallas calls by name, and whether the flags are known."""
    schedule = read_schedule(compiled, table=request.param)
    assert "single" in table_of(schedule)
    found = {op.name.partition(".")[0]: op for op in schedule.pallas}
    assert found.keys() == {"single", "double", "hard_start", "repeated"}
    return found | {"flags known": request.param is not None}


def test_steps_are_those_of_the_grid(ops):
    names = ("single", "double", "hard_start", "repeated")
    assert [ops[name].code.steps for name in names] == [OUTER * INNER] * 4
    assert [ops[name].calls for name in names] == [1, 1, 1, SCAN]


def test_work_in_the_body_is_in_every_step(ops):
    """Each tanh of a register takes the EUP once. Some of the flush, 2 rounds, is begun before the branch around it."""
    single, double = ops["single"].code, ops["double"].code
    assert 2 * REGISTERS <= single.step.slots["EUP"] < 4 * REGISTERS
    assert 4 * REGISTERS <= double.step.slots["EUP"] < 6 * REGISTERS
    assert double.step.bundles > single.step.bundles + REGISTERS
    assert single.total.bundles >= OUTER * INNER * single.step.bundles


def test_initialisation_and_flush_are_not_in_a_steady_step(ops):
    single, hard_start = ops["single"].code, ops["hard_start"].code
    assert abs(hard_start.step.bundles - single.step.bundles) <= 2 * REGISTERS
    assert hard_start.total.slots["EUP"] >= single.total.slots["EUP"] + OUTER * 17 * REGISTERS


def test_what_depends_on_data_is_counted_and_said(ops):
    undecided = ops["single"].code.undecided
    assert undecided == 0 if ops["flags known"] else undecided > 8


def test_bytes(ops):
    """HBM holds the arguments of 4 MiB and the results, unless the compiler keeps them in VMEM."""
    assert ops["single"].hbm_bytes <= 4 * (OUTER * ROWS * INNER * COLUMNS + OUTER * ROWS * COLUMNS + INNER)
    assert ops["single"].vmem_bytes >= 4 * ROWS * COLUMNS


def test_failures_are_one_line():
    with pytest.raises(ValueError, match="^chip = 'none': expected another$"):
        schedule_of(f"{__file__}:lower_walks_of_no_chip")
    with pytest.raises(ValueError, match="expected a function of"):
        schedule_of(f"{__file__}:lower_nothing")
    with pytest.raises(DumpError, match="(?i)memory"):
        schedule_of(f"{__file__}:lower_too_large", topology=TOPOLOGY)
    with pytest.raises(DumpError, match="more than 1 s"):
        schedule_of(f"{__file__}:lower_walks", topology=TOPOLOGY, timeout=1)
