"""`k3 plan`: the audit of the released model, its cache, its optimizer rules."""

import json
import subprocess
import sys

import pytest

from k3_jax import audit
from k3_jax.cli import main
from k3_jax.config import MeshConfig
from k3_jax.recipe import load_recipe
from k3_jax.weights.names import text_parameters

BY_PART = {
    "embedding": 1_174_405_120,
    "lm_head": 1_174_405_120,
    "kda": 30_618_086_496,
    "mla": 5_572_706_304,
    "dense_ffn": 726_663_168,
    "router_latent": 5_318_265_344,
    "shared_experts": 12_155_092_992,
    "routed_experts": 2_722_740_830_208,
    "norms": 1_333_248,
    "attn_res": 2_666_496,
    "output_attn_res": 14_336,
    "final_norm": 7_168,
}
# The table of K3's optimizer: rule -> names without their layer.
RULES = {
    ("muon", "per head"): "kda.q kda.k kda.v kda.g kda.f_b mla.q_b mla.kv_b mla.g",
    ("muon", "per expert"): "moe.w1 moe.w2 moe.w3",
    ("muon", "whole"): "kda.f_a kda.o mla.o mla.q_a mla.kv_a moe.router moe.latent_down moe.latent_up moe.shared.gate "
    "moe.shared.up moe.shared.down dense.gate dense.up dense.down",
    ("adamw", "elementwise"): "embed lm_head kda.b kda.q_conv kda.k_conv kda.v_conv kda.A_log kda.dt_bias kda.o_norm "
    "mla.q_a_norm mla.kv_a_norm moe.latent_norm attn_norm ffn_norm attn_res.norm attn_res.query ffn_res.norm "
    "ffn_res.query output_attn_res.norm output_attn_res.query norm",
    ("none", "set by Quantile Balancing"): "moe.router_bias",
}


@pytest.fixture
def plan(capsys):
    """`plan(*arguments)` -> (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(["plan", *arguments])
        return status, *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def shapes():
    return audit.parameter_shapes(audit.abstract_model(load_recipe("configs/k3.py").model))


def test_parameters_of_the_released_model(plan):
    status, out, err = plan("--config", "configs/k3.py", "--parameters", "--json")
    assert (status, err) == (0, "")
    expected = {"total": 2_779_484_476_000, "active": 104_189_612_640, "by_part": BY_PART}
    assert json.loads(out) == {"parameters": expected}
    assert list(json.loads(out)["parameters"]["by_part"]) == list(BY_PART)


def test_cache_of_the_released_model(plan):
    status, out, _ = plan("--config", "configs/k3.py", "--cache", "--json")
    assert status == 0
    cache = json.loads(out)["cache"]
    assert cache == {
        "values_per_token_and_layer": 576,
        "mla_layers": 24,
        "kda_layers": 69,
        "bytes_per_token": 27_648,
        "bytes_at_1e6_tokens": 27_648_000_000,
        "all_mla_bytes_at_1e6_tokens": 107_136_000_000,
        "relative_to_all_mla": -0.7419,
        "recurrent_bytes_bf16": 217_055_232,
        "conv_bytes_bf16": 15_261_696,
        "state_bytes_bf16": 232_316_928,
        "state_bytes": 449_372_160,
    }


def test_every_parameter_has_the_one_rule_of_the_table(plan, shapes):
    status, out, _ = plan("--config", "configs/k3.py", "--optimizer", "--json")
    assert status == 0
    rows = json.loads(out)["optimizer"]
    found = {}
    for row in rows:
        found.setdefault((row["optimizer"], row["kind"]), []).append(row["name"])
    assert {rule: sorted(names) for rule, names in found.items()} == {
        rule: sorted(names.split()) for rule, names in RULES.items()
    }
    assert sum(row["count"] for row in rows) == len(shapes) == 2736
    by_name = {row["name"]: row for row in rows}
    assert by_name["kda.q"]["blocks"] == 96 and by_name["kda.q"]["block_shapes"] == [[7168, 128]]
    assert by_name["mla.kv_b"]["blocks"] == 192 and by_name["mla.kv_b"]["block_shapes"] == [[512, 128], [512, 128]]
    assert by_name["mla.kv_a"]["block_shapes"] == [[7168, 512], [7168, 64]]
    assert by_name["moe.w2"]["blocks"] == 896 and by_name["moe.w2"]["count"] == 92
    assert by_name["kda.q"]["scale"] == [pytest.approx(0.2 * 7168**0.5)]
    assert {row["weight_decay"] for row in rows if row["optimizer"] == "muon"} == {0.1}


def test_the_model_has_the_parameters_of_the_released_checkpoint(shapes):
    """The abstract model against the name table, which is checked against the released index."""
    config = load_recipe("configs/k3.py").model
    assert shapes == {parameter.name: parameter.shape for parameter in text_parameters(config)}


def test_without_flags_all_sections(plan):
    status, out, _ = plan("--config", "configs/tiny.py", "--json")
    assert status == 0
    assert list(json.loads(out)) == ["parameters", "cache", "context", "optimizer"]


def test_tables_hold_the_numbers(plan):
    status, out, err = plan("--config", "configs/k3.py")
    assert (status, err) == (0, "")
    for text in ("2,779,484,476,000", "104,189,612,640", "2.779T", "104.2B", "232.32 MB", "27.65 GB", "-74.2 %", "576"):
        assert text in out
    for names in RULES.values():
        for name in names.split():
            assert f" {name} " in out
    assert "7168x512 + 7168x64" in out and "…" not in out


def test_its_arguments_are_read_without_jax(root):
    program = "import sys, k3_jax.plan.command; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=root).returncode == 0


def test_set_changes_the_model(plan):
    _, before, _ = plan("--config", "configs/tiny.py", "--parameters", "--json")
    _, after, _ = plan("--config", "configs/tiny.py", "--parameters", "--json", "--set", "model.dense_dim=513")
    before, after = (json.loads(text)["parameters"]["total"] for text in (before, after))
    assert after - before == 3 * 128


def test_a_dense_model_has_no_experts(plan):
    dense = ["--set", "model.moe=None", "--set", "model.first_dense_layers=7", "--set", "model.mla_layers=()"]
    status, out, _ = plan("--config", "configs/tiny.py", "--json", *dense)
    report = json.loads(out)
    assert status == 0
    assert report["parameters"]["by_part"]["routed_experts"] == report["parameters"]["by_part"]["mla"] == 0
    assert report["parameters"]["active"] == report["parameters"]["total"] - 256 * 128
    assert report["cache"]["values_per_token_and_layer"] == 0 and report["cache"]["relative_to_all_mla"] == -1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "configs/none.py"), "--config = configs/none.py: expected a file in"),
        (("--config", "configs/tiny.py", "--set", "model.hiden_size=1"), "did you mean model.hidden_size?"),
        (("--config", "configs/tiny.py", "--set", "data.batch_size=-1"), "DataConfig.batch_size = -1: expected a pos"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(plan, arguments, message):
    status, out, err = plan(*arguments)
    assert (status, out) == (2, "")
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["kda", "layers.3.kdaq", "layers.0.moe.w4", "normal", ""])
def test_a_parameter_of_no_part_is_refused(name):
    with pytest.raises(ValueError, match="expected exactly one part"):
        audit.part_of(name)


@pytest.mark.parametrize(
    ("axis", "ranks", "chosen", "received"),
    [("context", 2, "by_gather", 12_582_912), ("context", 64, "by_doubling", 81_788_928),
     ("zigzag", 2, "by_gather", 25_165_824), ("zigzag", 64, "by_doubling", 176_160_768)],
)  # fmt: skip
def test_the_prefix_of_states_is_the_one_of_fewer_bytes(axis, ranks, chosen, received):
    """A map of K3 is 12.6 MB."""
    (row,) = audit.context_traffic(MeshConfig(**{axis: ranks}), load_recipe("configs/k3.py").model)
    assert (row["axis"], row["ranks"], row["chosen"]) == (axis, ranks, chosen)
    assert row[chosen] == received == min(row["by_gather"], row["by_doubling"])


def test_the_prefix_in_words(plan):
    out = plan("--config", "configs/tiny.py", "--context", "--set", "mesh.zigzag=64")[1]
    assert "by_doubling" in out and "by_gather" not in out


def test_pipeline_of_the_released_model(tmp_path, capsys):
    """Seven idle passes of 64 + 7 each way; the first rank has 15 micro-batches in flight."""
    picture = tmp_path / "schedule.png"
    arguments = ["plan", "--config", "configs/k3.py", "--pipeline", "--json", "--set", "train.grad_accumulation=64"]
    assert main([*arguments, "--set", "mesh.pipe=8", "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)["pipeline"]
    assert found["bubble"] == pytest.approx(7 / 71)
    assert found["in_flight"] == [15, 13, 11, 9, 7, 5, 3, 1]
    assert found["layers"] == [12] * 7 + [9] and found["rows_kept"] == 36
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipeline"], "mesh.pipe = 1: expected a number of ranks above 1"),
        (["--pipeline", "--set", "mesh.pipe=16"], "16 x 1: expected at most 8 chunks"),
        (["--picture", "x.png"], "--picture: expected together with --pipeline"),
        (["--pipeline", "--set", "mesh.pipe=8", "--picture", "/no/x.png"], "--picture /no/x.png: cannot be written"),
    ],
)
def test_mistakes_with_pipelines(arguments, message, capsys):
    assert main(["plan", "--config", "configs/k3.py", *arguments]) == 2
    assert message in capsys.readouterr().err
