"""`k3 bench balance`: exact balance on every routing, its numbers, files of choices, mistakes."""

import json

import numpy as np
import pytest

from k3_jax.bench import balance, routing
from k3_jax.cli import main

SMALL = ["--ranks", "8", "--experts", "56", "--top-k", "4", "--tokens", "96"]


@pytest.fixture
def bench(capsys):
    """`bench(*arguments)` -> (exit status, stdout, stderr)."""
    return lambda *arguments: (main(["bench", "balance", *SMALL, *arguments]), *capsys.readouterr())


@pytest.mark.parametrize("pattern", routing.PATTERNS)
def test_every_rank_gets_the_same(bench, pattern):
    status, out, err = bench("--routing", pattern, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["max_tokens_per_rank"] == found["min_tokens_per_rank"] == 96 * 4
    assert found["lower_bound_redundant"] <= found["max_redundant_experts"] <= 56 // 8
    assert 0 < found["mean_redundant_experts"] <= found["max_redundant_experts"]
    assert found["plain_max_tokens_per_rank"] == round(found["plain_imbalance"] * 96 * 4)
    assert found["weights_mb_per_rank_max"] == pytest.approx(66.06 * found["max_redundant_experts"], rel=1e-3)
    assert found["rows_mb_per_rank"] < 96 * 4 * 3584 * 2 / 1e6 and found["planning_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 64, 128])
@pytest.mark.parametrize("pattern", routing.PATTERNS)
def test_at_k3s_size(capsys, ranks, pattern):
    assert main(["bench", "balance", "--ranks", str(ranks), "--routing", pattern, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_tokens_per_rank"] == found["min_tokens_per_rank"] == 8192 * 16
    assert found["max_redundant_experts"] <= 896 // ranks


def test_patterns():
    made = {name: routing.made_up(name, 4, 50, 40, 12) for name in routing.PATTERNS}
    for choices in made.values():
        assert choices.shape == (4, 50, 12) and (np.diff(np.sort(choices, axis=-1)) > 0).all()
    assert (made["one-expert"] == 0).any(-1).all()
    assert made["one-rank"].max() == 19  # 12 experts need two ranks of ten
    load = np.bincount(made["zipf"].reshape(-1), minlength=40)
    assert load[:4].sum() > 2 * load[-8:].sum()


def test_choices_from_a_file(bench, tmp_path):
    path = tmp_path / "choices.npy"
    np.save(path, routing.made_up("zipf", 8, 96, 56, 4).reshape(-1, 4).astype(np.int64))
    (_, out, _), (_, same, _) = bench("--routing", str(path), "--json"), bench("--routing", "zipf", "--json")
    ignore = {"planning_ms": 0, "routing": ""}
    assert json.loads(out) | ignore == json.loads(same) | ignore


def test_table_and_picture(bench, tmp_path):
    status, out, _ = bench("--plot", str(tmp_path / "balance.png"), "--json", str(tmp_path / "balance.json"))
    assert status == 0 and "8 ranks of 96 tokens, 4 of 56 experts, uniform" in out
    assert (tmp_path / "balance.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "balance.json").read_text())["ranks"] == 8


def test_numbers_by_hand():
    """Two ranks, experts 0 and 1 at home on the first: 7 of 8 rows are for them, so the second borrows one expert."""
    plan, _ = balance.timed_plan(np.array([[3, 1, 0, 0], [2, 1, 1, 0]], np.int32))
    found = balance.balanced(plan)
    assert (found["max_tokens_per_rank"], found["min_tokens_per_rank"]) == (4, 4)
    assert (found["max_redundant_experts"], found["mean_redundant_experts"]) == (1, 0.5)
    assert (found["lower_bound_redundant"], found["gradient_turns"]) == (1, 1)
    # The second rank gets the last three of expert 0's five rows, one of which comes from the first rank.
    assert balance.rows_moved(plan).tolist() == [[3, 1], [1, 3]]
    assert found["rows_mb_per_rank"] == pytest.approx(1 * 3584 * 2 / 1e6)
    plain = balance.unbalanced(plan.counts)
    assert (plain["plain_max_tokens_per_rank"], plain["plain_imbalance"]) == (7, 7 / 4)
    assert plain["capacity_dropped"] == pytest.approx((5 - 2.5) / 8)


def test_lower_bound_of_the_tight_input():
    for R, E in ((8, 56), (16, 896)):
        counts = np.repeat(np.repeat([0] + [1] * (R - 1), E // R)[None], R, 0)
        assert balance.lower_bound(counts) == -(-E * (R - 1) // R**2)


def test_a_wrong_plan_is_noticed():
    counts = np.array([[3, 1, 0, 0], [2, 2, 0, 0]], np.int32)
    plan, _ = balance.timed_plan(counts)
    with pytest.raises(RuntimeError, match="rows do not arrive exactly once"):
        balance.rows_moved(plan._replace(share=plan.share * np.array([[1], [0]])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "--experts = 56: expected a multiple of --ranks = 5"),
        (["--tokens", "0"], "--tokens = 0: expected a positive integer"),
        (["--top-k", "57"], "--top-k = 57: expected at most --experts = 56"),
        (["--routing", "skewed"], "--routing = skewed: No such file or directory: expected a file, or uniform, zipf"),
        (["--tokens", "99999999"], "--ranks x --tokens x --top-k = 3199999968: expected less than 2^31 rows"),
        (["--plot", "balance.txt"], "--plot = balance.txt: expected a name that ends in .png"),
    ],
)
def test_mistakes(bench, arguments, message):
    status, out, err = bench(*arguments)
    assert (status, out) == (2, "") and message in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (np.zeros((768, 4)), "holds float64 [768, 4]: expected integers [768, 4]"),
        (np.zeros((10, 4), int), "holds int64 [10, 4]: expected integers [768, 4], the experts of 8 x 96 tokens"),
        (np.tile([0, 1, 2, 56], (768, 1)), "holds experts 0 to 56: expected 0 to 55"),
        (np.tile([0, 1, 2, 2**32 + 3], (768, 1)), "holds experts 0 to 4294967299: expected 0 to 55"),
        (np.tile([0, 1, 2, 2], (768, 1)), "expected 4 different experts per token"),
    ],
)
def test_wrong_files(bench, tmp_path, choices, message):
    path = tmp_path / "choices.npy"
    np.save(path, choices)
    status, _, err = bench("--routing", str(path))
    assert status == 2 and message in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["choices.npz", "choices.txt", "broken.npz"])
def test_files_that_are_no_arrays(bench, tmp_path, name):
    path = tmp_path / name
    np.savez(path, a=np.zeros(3)) if name == "choices.npz" else path.write_bytes(b"PK\x03\x04 0 1 2 3")
    status, _, err = bench("--routing", str(path))
    assert status == 2 and f"--routing = {path}: expected a .npy file of integers" in err.splitlines()[-1]
