"""`k3 bench kda --topology` and `k3 bench attention`: what they compile, from the command line to the JSON."""

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
