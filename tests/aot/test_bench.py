"""`k3 bench kda --topology`: the programs that it compiles, from the command line to the JSON."""

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
