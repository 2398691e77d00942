"""`k3 bench`: what it prints, that a wrong result stops it, the arithmetic of its tables. No timed assertions."""

import json
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.bench import kda_device, kda_measured, kda_peers, kda_predicted, kda_tpu_peers, measure
from k3_jax.cli import main
from pallas_kernels.attention import bench as attention_bench
from pallas_kernels.common import tpu
from pallas_kernels.common.dump import DumpError
from pallas_kernels.common.schedule import Code, OpSchedule, Schedule, Work
from pallas_kernels.kda.bench import Case, compulsory_bytes, forward, make_inputs, operations

FULL = Case(1, 8192, 32, 128, 128, "bfloat16")


@pytest.fixture
def bench(capsys):
    """`bench(*arguments)` -> (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(["bench", "kda", *arguments])
        except SystemExit as end:  # argparse
            status = end.code
        return status, *capsys.readouterr()

    return call


def test_measured(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(kda_measured, "peers", lambda *_: [])
    place = tmp_path / "kda.json"
    status, out, err = bench("--shape", "1,20,1,8,12", "--repeats", "2", "--json", str(place))
    assert status == 0, err
    assert "1,20,1,8,12 float32" in out and "ns/token/head" in out
    numbers = json.loads(place.read_text())
    assert numbers["shape"] == {"B": 1, "T": 20, "H": 1, "K": 8, "V": 12}
    for direction in ("forward", "forward_backward"):
        assert numbers[direction].keys() == {"xla", "reference"}
        for row in numbers[direction].values():
            assert 0 < row["error"] < 1e-4 and row["runs"] == 2 and row["compile_s"] > 0
            assert 0 < row["min_ms"] <= row["median_ms"] and row["cpu_ms"] > 0
            assert row["ns_per_token_head"] == pytest.approx(1e6 * row["min_ms"] / 20)


def test_baseline(bench, monkeypatch):
    """The general form, which must be right before it is timed."""
    monkeypatch.setattr(kda_measured, "peers", lambda *_: [])
    status, out, err = bench("--shape", "1,40,2,8,12", "--repeats", "1", "--baseline", "dplr", "--json", "-")
    assert status == 0, err
    numbers = json.loads(out)
    assert numbers["forward_backward"].keys() == {"xla", "reference", "dplr"}
    status, _, err = bench("--topology", "tpu7x:2x2x1", "--baseline", "dplr")
    assert status == 2 and "--baseline: expected neither" in err


def test_on_a_tpu(bench, monkeypatch):
    """A CPU that calls itself a TPU, without the kernels that it cannot run."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(kda_device, "IMPLEMENTATIONS", ("xla",))
    monkeypatch.setattr(kda_device.tpu, "chip", lambda kind: tpu.V6E)
    status, out, err = bench("--shape", "2,600,4,16", "--dtype", "float32", "--repeats", "2", "--json", "-")
    assert status == 0, err
    numbers = json.loads(out)
    assert numbers["shape"] == {"B": 2, "T": 600, "H": 4, "K": 16, "V": 16}
    row = numbers["forward_backward"]["xla"]
    assert 0 < row["min_ms"] <= row["median_ms"]
    assert row["of_flops_roof"] == pytest.approx(row["tflops"] / 920)
    assert bench("--baseline", "dplr")[0] == 2


def test_share_of_the_roofs():
    found = kda_device.summary(FULL, False, tpu.TPU7X, [kda_device.CALLS * x for x in (2e-3, 1e-3, 4e-3)])
    assert found["min_ms"] == pytest.approx(1) and found["median_ms"] == pytest.approx(2)
    assert found["tflops"] == pytest.approx(operations(FULL, False) / 2e-3 / 1e12)
    assert found["of_hbm_roof"] == pytest.approx(compulsory_bytes(FULL, False) / 3.7e12 / 2e-3)


@pytest.mark.parametrize("wrong", [0.0, np.nan])
def test_a_wrong_result_stops_it(bench, monkeypatch, wrong):
    right, shape = {"o": np.ones(3)}, ("--shape", "1,4,1,8")
    entrant = lambda case, inputs, backward, name: measure.Contestant(  # noqa: E731
        name, lambda: None, lambda _: {"o": right["o"] * (wrong if backward and name == "xla" else 1)}
    )
    monkeypatch.setattr(kda_measured, "ours", entrant)
    monkeypatch.setattr(kda_measured, "exact", lambda *_: right)
    monkeypatch.setattr(kda_measured, "peers", lambda *_: [])
    monkeypatch.setattr(kda_measured, "run_in_turn", lambda *_: pytest.fail("timed"))
    status, out, err = bench(*shape)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("k3 bench kda: xla, forward_backward: the output is off by ")


def test_gradients_are_checked_one_by_one():
    deviations = [{"o": 1e-6, "q": 9e-5, "g": 2e-4, "beta": np.nan}]
    lines = kda_measured.failures("forward", [measure.Contestant("x", None, None)], deviations, 1e-5)
    assert lines == [
        "x, forward: the gradient of g is off by 2.0e-04, allowed 1e-04",
        "x, forward: the gradient of beta is off by nan, allowed 1e-04",
    ]


def test_errors_of_small_tensors_are_relative_to_all():
    entrant = measure.Contestant("x", lambda: 3, lambda n: {"a": np.full(n, 1.0), "b": np.full(n, 1e-9)})
    found = measure.errors(entrant, {"a": np.ones(3), "b": np.zeros(3)})
    assert found["a"] == 0 and found["b"] == pytest.approx(1e-3)


def test_runs_alternate_and_slow_ones_drop_out(monkeypatch):
    order = []
    entrants = [measure.Contestant(name, lambda name=name: order.append(name), None, 1.0) for name in "ab"]
    samples = measure.run_in_turn(entrants, 3)
    assert order == list("aabb") + list("ab") * 3
    assert [len(sample.wall) for sample in samples] == [3, 3]
    monkeypatch.setattr(measure, "SECONDS_EACH", 0.0)
    assert len(measure.run_in_turn(entrants, 9)[0].wall) == measure.LEAST_RUNS


def schedule_with(chip: tpu.Chip) -> Schedule:
    """A Pallas call of 256 steps, called twice, beside an op of XLA."""
    capacity = {name: 2 for name in ("MXU", "XLU", "VALU", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL")}
    step = Work(4000, 4400, Counter(MXU=4000, SPILL=800, FILL=400), capacity)
    kernel = Code(256, step, step * 256 + Work(1000, 1000, Counter(), capacity), 0)
    copied = Work(5000, 5000, Counter(), capacity)
    copy = Code(1, copied, copied, 0)
    ops = (OpSchedule("kda.1", "pallas", 2, kernel, 10**6, 2**20), OpSchedule("copy.2", "copy", 1, copy, 10**6, 0))
    return Schedule(chip, ops, 74 * 10**8)


def test_predicted_keys(bench, monkeypatch):
    calls = []
    monkeypatch.setattr(
        kda_predicted, "schedule_of", lambda target, **options: calls.append(options) or schedule_with(tpu.TPU7X)
    )
    status, out, _ = bench("--topology", "tpu7x:2x2x1", "--json", "-")
    numbers = json.loads(out)
    assert status == 0 and numbers.keys() == {"shape", "forward", "forward_backward"}
    assert numbers["shape"] == {"B": 1, "T": 8192, "H": 32, "K": 128, "V": 128}
    assert numbers["forward"] == {
        "bundles_per_token_head": (2 * (256 * 4000 + 1000) + 5000) / 262144,
        "hbm_mb": 7400.0,
        "spill_share": 0.1,
        "fill_share": 0.05,
        "mxu_share": 0.5,
        "predicted_ms": pytest.approx(2.0),  # of HBM, at 3.7 TB/s; the bundles take 1.4 ms
    }
    assert [options["backward"] for options in calls] == [False, True]
    assert calls[0]["implementation"] == "pallas" and calls[0]["dtype"] == "bfloat16"


def test_predicted_text(bench, monkeypatch):
    monkeypatch.setattr(kda_predicted, "schedule_of", lambda *_, **__: schedule_with(tpu.V6E))
    status, out, _ = bench("--topology", "v6e:2x4", "--implementation", "xla", "--shape", "1,64,2,16")
    assert status == 0 and "xla on one device of v6e:2x4, 1,64,2,16,16 bfloat16" in out
    assert "no calibration for v6e" in out and "Predicted, not measured" in out and "kda.1" in out


@pytest.mark.parametrize("arguments", [["--dtype", "float32"], ["--shape", "1,8,2,8", "--segments", "3,5"]])
def test_public_kernels_take_whole_rows_in_bfloat16(bench, monkeypatch, arguments):
    monkeypatch.setattr(kda_tpu_peers, "installed", lambda: ["tokamax"])
    monkeypatch.setattr(kda_predicted, "schedule_of", lambda *_, **__: pytest.fail("compiled"))
    status, _, err = bench("--topology", "tpu7x:2x2x1", "--peers", *arguments)
    assert status == 2 and "--peers: expected neither --segments nor float32" in err


def test_public_kernels_beside_ours(bench, monkeypatch, tmp_path):
    """One that has no backward pass, and one that refuses the chip in one direction."""

    def schedule_of(target, *, backward, peer=None, **_):
        if peer == "tokamax" and not backward:
            raise DumpError("out of VMEM")
        return schedule_with(tpu.TPU7X)

    monkeypatch.setattr(kda_predicted, "schedule_of", schedule_of)
    monkeypatch.setattr(kda_tpu_peers, "installed", lambda: ["tokamax", "mega_kda"])
    picture, place = tmp_path / "kda.png", tmp_path / "kda.json"
    arguments = ["--topology", "tpu7x:2x2x1", "--peers", "--plot", str(picture), "--json", str(place)]
    status, out, err = bench(*arguments)
    assert status == 0 and "forward mega_kda" in out and "forward of tokamax does not compile" in err
    numbers = json.loads(place.read_text())
    assert {name: list(x) for name, x in numbers["peers"].items()} == {
        "tokamax": ["forward_backward"], "mega_kda": ["forward"],
    }  # fmt: skip
    assert numbers["peers"]["mega_kda"]["forward"] == numbers["forward"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("error", "status"), [(ValueError("topology = 'x'"), 2), (DumpError("out of VMEM"), 1)])
def test_what_does_not_compile_is_one_line(bench, monkeypatch, error, status):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(kda_predicted, "schedule_of", fail)
    found, out, err = bench("--topology", "x")
    assert (found, out) == (status, "") and str(error) in err.splitlines()[-1]


def test_fast_enough_bundles_are_what_is_predicted():
    schedule = Schedule(tpu.TPU7X, schedule_with(tpu.TPU7X).ops, 0)
    assert schedule.predicted_seconds == pytest.approx(schedule.work.bundles / 1.43e9)
    assert Schedule(tpu.V5P, schedule.ops, 0).predicted_seconds is None


def test_counts_of_the_roofline():
    """spec: direct form 6 d^2 + 8 C d + C^2 forward, 14 d^2 + 20 C d backward, at d = 128, C = 64."""
    assert operations(FULL, backward=False) / FULL.token_heads == 167_936
    assert operations(FULL, backward=True) / FULL.token_heads == 167_936 + 393_216
    arguments = 3 * 256 + 512 + 2  # q, k, v, g and beta, in bytes per token and head
    assert compulsory_bytes(FULL, backward=False) == FULL.token_heads * (arguments + 256)
    assert compulsory_bytes(FULL, backward=True) == FULL.token_heads * (2 * arguments + 2 * 256)


def test_inputs_are_flat_and_normalised():
    inputs = make_inputs(Case(2, 5, 3, 4, 6, "bfloat16"))
    assert {name: x.shape[2] for name, x in inputs.items()} == {"q": 12, "k": 12, "v": 18, "g": 12, "beta": 3, "do": 18}
    assert inputs["g"].dtype == np.float32 and inputs["v"].dtype.name == "bfloat16"
    norms = np.linalg.norm(inputs["k"].astype(np.float32).reshape(2, 5, 3, 4), axis=-1)
    assert np.abs(norms - 1).max() < 0.02 and -1 <= inputs["g"].min() and inputs["g"].max() <= 0


def test_packed_segments_do_not_see_each_other():
    case = Case(1, 5, 1, 4, 4, "float32", segments=(2, 0, 3))
    assert str(case) == "1,5,1,4,4 float32 packed 2,0,3"
    inputs = [jnp.asarray(x) for name, x in make_inputs(case).items() if name != "do"]
    packed, states = forward(case, "reference")(*inputs)
    alone, state = forward(Case(1, 3, 1, 4, 4, "float32"), "reference")(*(x[:, 2:] for x in inputs))
    assert np.allclose(packed[:, 2:], alone, atol=1e-6) and np.allclose(states[2:], state, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2"], "--shape = 1,2: expected B,T,H,K or B,T,H,K,V"),
        (["--shape", "1,x,2,8"], "'1,x,2,8': expected integers with commas"),
        (["--shape", "1,0,2,8"], "--shape = 1,0,2,8,8: expected positive sizes"),
        (["--shape", "1,9,2,8", "--segments", "4,4"], "expected lengths that add up to T = 9"),
        (["--shape", "2,8,2,8", "--segments", "4,4"], "B = 1, as B is 2"),
        (["--shape", "1,1000000,96,128"], "GB of states, and this machine has"),
        (["--repeats", "0"], "--repeats = 0: expected a positive integer"),
        (["--json", "nowhere/at/all.json"], "--json = nowhere/at/all.json: expected a file in a folder"),
        (["--peers"], "--peers: expected --topology"),
        (["--topology", "x", "--plot", "kda.txt"], "--plot = kda.txt: expected a name that ends in .png"),
    ],
)
def test_mistakes(bench, arguments, message):
    status, out, err = bench(*arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1 and message in err, err


def test_peers_are_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert kda_peers.peers(FULL, {}, backward=False) == []


def test_peers_agree():
    pytest.importorskip("torch", reason="compares with torch references where they are installed")
    case = Case(1, 70, 2, 8, 8, "float32", segments=(3, 0, 67))
    inputs = make_inputs(case)
    entrants = kda_peers.peers(case, inputs, backward=True)
    expected = kda_measured.exact(case, inputs, True)
    assert entrants and max(max(measure.errors(entrant, expected).values()) for entrant in entrants) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2"], "--shape = 1,2: expected B,T,H"),
        (["--shape", "1,100,2"], "T a multiple of 1024"),
        (["--shape", "1,16384,2"], "up to 8192"),
    ],
)
def test_attention_of_a_wrong_shape(arguments, message, capsys):
    assert main(["bench", "attention", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_attention_counts_steps_and_operations():
    case = attention_bench.Case(2, 4096, 3)
    assert (case.steps("splash"), case.steps("pallas")) == (2 * 3 * 10, 2 * 2 * 10)
    pairs = 2 * 3 * 4096 * 4097 // 2
    assert attention_bench.operations(case, False) == pairs * 2 * (192 + 128)
    assert attention_bench.operations(case, True) == pairs * 2 * (192 + 128 + 3 * 192 + 2 * 128)
