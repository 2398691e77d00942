"""`k3 bench grouped`: the arithmetic behind its tables, what it prints, mistakes. tests/aot compiles a kernel."""

import json

import numpy as np
import pytest

from k3_jax.bench import grouped, grouped_peers
from k3_jax.cli import main
from pallas_kernels.common import tpu
from pallas_kernels.common.dump import DumpError
from pallas_kernels.grouped import bench
from pallas_kernels.grouped.bench import Case, Kernel
from pallas_kernels.grouped.visits import Blocks

CASE = Case(R=2048, A=256, C=512, G=3)
# A block takes 2 MXUs of 256 x 256, two rows per cycle each, 1024 x 256 x 512 / 2^18 = 512 cycles at least.
KERNEL = Kernel(tpu.TPU7X, Blocks(1024, 512), 1, (256, 512), {0: 100, 1: 400, 2: 600}, copied_bytes=10**6)


def test_peak_of_the_matrix_units():
    assert (KERNEL.peak_cycles, KERNEL.mxu_share, KERNEL.cycles_per_cube) == (512, 512 / 600, 600 / 8)
    on_v5p = Kernel(tpu.V5P, Blocks(128, 128), 1, (128, 128), {0: 0, 1: 64}, 0)
    assert on_v5p.peak_cycles == 32  # four MXUs of 128 x 128, one row per cycle


def test_rows_and_seconds():
    """[700, 0, 1348]: 2 units, then one of the same block, then 2; then a call in which one group has all rows."""
    sizes = np.array([[700, 0, 1348], [0, 2048, 0]])
    rows, seconds = KERNEL.rows_and_seconds(sizes, CASE, "matmul")
    assert rows == np.mean([2560, 2048])
    clock = 1155e12 / (2 * 1024 * 256 * 512 / 512)
    assert clock == pytest.approx(2.2e9, rel=2e-3)
    work = np.array([600 + 400 + 600, 600 + 600]) / clock
    moved = np.array([2 * 2048 * 256 + 2 * groups * 256 * 512 + 4 * 2048 * 512 for groups in (2, 1)]) / 3.7e12
    assert (moved > work).all() and seconds == pytest.approx(moved.mean())
    slow = Kernel(tpu.TPU7X, Blocks(1024, 512), 3, (256, 512), {0: 10**5, 1: 4 * 10**5, 2: 6 * 10**5}, 0)
    assert slow.rows_and_seconds(sizes, CASE, "matmul")[1] == pytest.approx(3e3 * work.mean())


def test_a_device_of_two_cores():
    """Each has half of the parts, at half of the device's peak."""
    one = Kernel(tpu.V5P, Blocks(256, 256), 1, (256, 256), {0: 0, 1: 128 * 1000}, 0)
    seconds = one.rows_and_seconds(np.array([[2048, 0, 0]]), CASE, "matmul")[1]
    assert one.peak_cycles == 256 and seconds == pytest.approx(500 * CASE.operations / 459e12)


def test_groups_without_rows_are_visited_by_a_gradient():
    slow = Kernel(tpu.TPU7X, Blocks(1024, 512), 1, (256, 512), {0: 10**5, 1: 4 * 10**5, 2: 6 * 10**5}, 0)
    sizes = np.array([[0, 2048, 0]])
    found = [slow.rows_and_seconds(sizes, CASE, product)[1] for product in ("outer", "matmul")]
    assert found[0] / found[1] == pytest.approx(14 / 12)


def test_operands_are_read_again_for_every_part():
    kernel = Kernel(tpu.TPU7X, Blocks(256, 256), 6, (128, 200), {0: 0, 1: 1}, 0)
    assert kernel.hbm_bytes(CASE, "matmul", 2) == 2 * 2048 * 256 * 3 + 2 * 2 * 256 * 512 + 4 * 2048 * 512
    assert kernel.hbm_bytes(CASE, "outer", 2) == 2 * 2048 * (256 * 3 + 512 * 2) + 4 * 3 * 256 * 512


@pytest.mark.slow
def test_the_largest_blocks_are_the_cheapest():
    """Why no choice is made at run time: by the cycles of windows on a TPU7x, for loads of every kind."""
    random, case = np.random.default_rng(0), Case(32768, 3584, 3072, 28)
    shares = np.concatenate([random.dirichlet(np.full(28, skew), 50) for skew in (0.05, 0.3, 1, 100)])
    sizes = np.stack([random.multinomial(case.R, share) for share in shares])
    cycles = {0: 236, 1: 3202, 2: 5892, 4: 11274, 8: 22027}  # a product of 128 rows times the units
    kernels = [Kernel(tpu.TPU7X, Blocks(rows, 128), 2, (3584, 1536), cycles, 0) for rows in (256, 512, 1024)]
    for load in sizes:
        seconds = [kernel.rows_and_seconds(load, case, "matmul")[1] for kernel in kernels]
        assert seconds[2] < seconds[1] < seconds[0]


def test_chunks_are_runs_of_rows():
    found = grouped.in_chunks(np.array([[5, 0, 3], [0, 8, 0]]), 4)
    np.testing.assert_array_equal(found, [[[4, 0, 0], [1, 0, 3]], [[0, 4, 0], [0, 4, 0]]])


@pytest.mark.slow
def test_sizes_are_those_of_the_plan(monkeypatch):
    monkeypatch.setattr(grouped, "TOKENS", 64)
    monkeypatch.setattr(grouped, "EXPERTS", 32)
    sizes = grouped.sizes_of("zipf", 4)
    assert sizes.shape == (4, 16) and (sizes.sum(1) == 64 * 16).all()


@pytest.fixture
def command(monkeypatch, capsys):
    """`command(*arguments)` -> (exit status, stdout, stderr), nothing planned or compiled."""

    def kernel(topology, case, product, competitor, target):
        if competitor == "megablox" and product == "matmul":
            raise DumpError("out of VMEM")
        cycles = (
            {0: 10**5, 1: 4 * 10**5, 2: 6 * 10**5} if competitor == "pallas" else {0: 0, 1: 4 * 10**5, 2: 7 * 10**5}
        )
        return Kernel(tpu.chip(topology), Blocks(1024, 512), 2, (3584, 1536), cycles, 10**6)

    monkeypatch.setattr(bench, "kernel", kernel)
    monkeypatch.setattr(grouped_peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(grouped, "sizes_of", lambda pattern, ranks: np.array([[131072 - 27] + [1] * 27]))
    return lambda *arguments: (main(["bench", "grouped", *arguments]), *capsys.readouterr())


def test_numbers(command, tmp_path):
    place = tmp_path / "grouped.json"
    status, out, err = command("--json", str(place))
    assert status == 0 and "matmul, megablox: no schedule: out of VMEM" in err
    assert "transposed: 32768 rows of 3072, 3584, 28 groups" in out and "Predicted, not measured" in out
    found = json.loads(place.read_text())
    assert found.keys() == {"topology", "ranks", "matmul", "transposed", "outer"}
    assert [list(found[product]) for product in ("matmul", "transposed", "outer")] == [
        ["pallas", "xla"], ["pallas", "xla", "megablox"], ["pallas", "xla"],
    ]  # fmt: skip
    ours, xla = (found["matmul"][name] for name in ("pallas", "xla"))
    assert ours["routing"].keys() == {"uniform", "zipf", "one-expert", "one-rank"}
    assert ours["routing"]["zipf"]["of_peak"] > xla["routing"]["zipf"]["of_peak"] > 0
    assert ours["routing"]["zipf"]["rows_computed"] > 1


def test_ours_must_compile(command, monkeypatch):
    def fail(*_):
        raise DumpError("out of VMEM")

    monkeypatch.setattr(bench, "kernel", fail)
    status, out, err = command()
    assert (status, out) == (1, "") and "matmul, pallas: no schedule: out of VMEM" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "--ranks = 5: expected a divisor of 896"),
        (["--json", "nowhere/at/all.json"], "--json = nowhere/at/all.json: expected a file in a folder"),
        (["--topology", "tpu9:2x2"], "--chip = 'tpu9:2x2': expected one of"),
    ],
)
def test_mistakes(command, arguments, message):
    status, out, err = command(*arguments)
    assert (status, out) == (2, "") and message in err.splitlines()[-1]
