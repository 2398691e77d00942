"""`k3 bench` with --topology: KDA, attention, grouped products, the decode step; from the command line to the JSON."""

import json

import pytest

from k3_jax.cli import main

pytestmark = pytest.mark.aot_compile


def test_the_xla_form(tmp_path, capsys):
    place = tmp_path / "kda.json"
    arguments = ["--topology", "tpu7x:2x2x1", "--implementation", "xla", "--shape", "1,64,2,128"]
    assert main(["bench", "kda", *arguments, "--json", str(place)]) == 0
    assert "xla on one device of tpu7x:2x2x1, 1,64,2,128,128 bfloat16" in capsys.readouterr().out
    forward, both = (json.loads(place.read_text())[name] for name in ("forward", "forward_backward"))
    for numbers in (forward, both):
        assert numbers["predicted_ms"] >= numbers["bundles_per_token_head"] * 128 / 1.43e6
        assert all(0 < numbers[f"{slot}_share"] < 1 for slot in ("mxu", "fill", "spill"))
        assert numbers["hbm_mb"] > 0
    assert both["bundles_per_token_head"] > 2 * forward["bundles_per_token_head"]


def test_a_topology_that_does_not_exist(capsys):
    assert main(["bench", "kda", "--topology", "tpu9:2x2", "--implementation", "xla"]) == 2
    assert "k3 bench: error: topology = 'tpu9:2x2': expected a name" in capsys.readouterr().err.splitlines()[-1]


def test_attention(tmp_path, capsys):
    place = tmp_path / "attention.json"
    assert main(["bench", "attention", "--shape", "1,4096,2", "--json", str(place)]) == 0
    assert "forward_backward splash" in capsys.readouterr().out
    numbers = json.loads(place.read_text())
    assert numbers["shape"] == {"B": 1, "T": 4096, "H": 2}
    for direction in ("forward", "forward_backward"):
        for row in numbers[direction].values():
            assert 0.5 < row["mxu_share"] < 1 and row["hbm_mb"] > 0 and row["predicted_ms"] > 0
        found = {name: row["bundles_per_token_head"] for name, row in numbers[direction].items()}
        assert found["pallas"] < found["splash"]


def test_grouped(tmp_path):
    """Ours take fewer cycles than XLA's kernels, and under every routing a larger share of the peak."""
    place = tmp_path / "grouped.json"
    assert main(["bench", "grouped", "--json", str(place)]) == 0
    numbers = json.loads(place.read_text())
    for product in ("matmul", "transposed", "outer"):
        ours, xla = (numbers[product][name] for name in ("pallas", "xla"))
        assert 64 < ours["cycles_per_cube"] < 69 and ours["cycles_per_cube"] < xla["cycles_per_cube"]
        assert ours["copied_mb"] < 1
        for pattern, found in ours["routing"].items():
            assert xla["routing"][pattern]["of_peak"] + 0.05 < found["of_peak"] < 1
            assert 1 <= found["rows_computed"] < 1.05


def test_decode(tmp_path, capsys):
    """K3 itself on 16 chips; bars of speed are not asserted, they are in the report."""
    place = tmp_path / "decode.json"
    assert main(["bench", "decode", "--topology", "tpu7x:2x2x4", "--baseline", "mla", "--json", str(place)]) == 0
    assert "Predicted, not measured" in capsys.readouterr().out
    x = json.loads(place.read_text())
    assert x["pallas_calls_per_step"] == x["weight_copies"] == x["max_rank_over_mean"] == 1
    assert x["weight_sized_copies"] == 0 and x["prefill_fits"]
    assert x["vmem_mib_planned"] < x["vmem_mib_per_core"] <= 60 and x["hbm_gib_per_core"] <= 90
    assert x["collective_phases_per_layer"] == {"kda": 4, "mla": 5} and x["bytes_over_minimum"] <= 1.1
    assert sum(stage["bundles"] for stage in x["stages"]) > x["static_bundles"] / 2
    now = x["predicted_step_ms"]
    assert now["now"] == pytest.approx(now["compute"] + now["exchanges"] + now["hbm"])
    assert x["predicted_tokens_per_s"] == pytest.approx(1e3 / now["now"]) and x["roofline_tokens_per_s"] > 850
    assert x["predicted_published_tokens_per_s"] == pytest.approx(249, rel=1e-3)
    assert x["baseline_mla"]["slower"] > 1 and x["constants"]["phase_us"] == 4
