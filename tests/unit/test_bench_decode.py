"""`k3 bench decode`: mistakes, and the text and picture of numbers that a file holds."""

import json

import pytest

from k3_jax.bench import decode_predicted, decode_report
from k3_jax.cli import main


@pytest.fixture
def bench(capsys):
    return lambda *arguments: (main(["bench", "decode", *arguments]), *capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "9"], "--batch = 9: expected 1 to 8"),
        (["--context", "0"], "--context = 0: expected a positive number"),
        (["--baseline", "mla"], "--baseline: expected --topology"),
        (["--plot", "a.png"], "--plot: expected --topology"),
        (["--topology", "tpu7x:2x2x4", "--plot", "a.txt"], "expected a name that ends in"),
        (["--topology", "tpu9:2x2"], "--topology = 'tpu9:2x2': expected a name"),
        (
            ["--topology", "tpu7x:2x2x4", "--config", "configs/tiny.py"],
            "error: kda.heads = 4: expected a multiple of ranks = 32",
        ),
        (["--topology", "v6e:2x4"], "--topology = v6e:2x4: expected a TPU7x slice"),
    ],
)
def test_mistakes(bench, arguments, message):
    status, _, err = bench(*arguments)
    assert status == 2 and message in err.splitlines()[-1]


@pytest.fixture
def numbers():
    """A few of them, made up."""
    line = {"phase_us": 3.5, "tokens_per_s": 300.0, "published_tokens_per_s": 200.0, "ratio": 1.5}
    published = {"measured_tokens_per_s": {1: 249.0, 2: 392.0}, "model_tokens_per_s": {1: 249.0, 2: 401.8}}
    return {
        "config": "k3", "topology": "tpu7x:2x2x4", "batch": 1, "context": 9, "predicted_tokens_per_s": 300.0,
        "predicted_step_ms": {"now": 3.0, "compute": 1.0, "exchanges": 1.5, "hbm": 0.5}, "roofline_tokens_per_s": 800.0,
        "hbm_gib_per_core": 47.0, "vmem_mib_per_core": 61.0, "pallas_calls_per_step": 1, "weight_sized_copies": 0,
        "collective_phases_per_layer": {"kda": 4, "mla": 5}, "bytes_per_step": 1.5e11, "bytes_over_minimum": 1.08,
        "max_rank_over_mean": 1.0, "weight_copies": 1, "weight_bytes_over_model": 1.05, "prefill_fits": True,
        "prefill": {"gib_per_core": 5.0}, "static_bundles": 45000, "sensitivity": [line],
        "stages": [{"name": "head", "bundles": 14000, "dma_bytes": 73e6}],
        "published": published | {"held_out_error": {2: 0.025}},
    }  # fmt: skip


def test_bars(numbers):
    missed = {x["name"] for x in decode_predicted.bars(numbers) if not x["met"]}
    assert missed == {"vmem_mib_per_core", "predicted_tokens_per_s", "ratio at 3.5 us"}
    later = decode_predicted.bars(numbers | {"batch": 2})
    assert "predicted_tokens_per_s" not in {x["name"] for x in later}


def test_table_and_picture(numbers, tmp_path):
    text = decode_report.text(numbers | {"bars": decode_predicted.bars(numbers)})
    assert "Predicted, not measured" in text and "+2.5 %" in text and "MISSED" in text
    decode_report.draw(numbers, str(tmp_path / "decode.png"))
    assert (tmp_path / "decode.png").stat().st_size > 10_000


@pytest.mark.slow
def test_measured(bench, tmp_path):
    place = tmp_path / "decode.json"
    status, out, err = bench("--context", "8", "--json", str(place))
    assert status == 0, err
    assert "the XLA decode path, measured on" in out
    found = json.loads(place.read_text())
    assert found["tokens_per_s"] == pytest.approx(1e3 / found["median_step_ms"])
