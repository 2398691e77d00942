"""What a run does when something goes wrong: a signal, a model that diverges, a disk that is full, wrong weights."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from k3_jax.config import ConfigError, ContextStage, MeshConfig, RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.train import loop, setup
from k3_jax.train.report import plot_losses, read_metrics
from k3_jax.train.setup import locked
from tests.train.small_run import losses, small_run


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunConfig:
    monkeypatch.setattr(loop, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
    return dataclasses.replace(small_run(tmp_path), mesh=MeshConfig())


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_saves_and_stops(run, tmp_path, monkeypatch, number):
    check = loop.Session.check

    def check_and_signal(self, bad, step):
        check(self, bad, step)
        if step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loop.Session, "check", check_and_signal)
    assert loop.train(run, tmp_path / "work") == 3
    assert (tmp_path / "work" / "checkpoints" / "3" / "model").is_dir()
    assert list(losses(tmp_path / "work")) == [1, 2, 3]


def test_diverged_run_skips_and_ends(run, tmp_path, monkeypatch):
    new_model = setup.new_model

    def broken(run):
        model = new_model(run)
        model.embed = nnx.Param(model.embed[...] * jnp.nan)
        return model

    monkeypatch.setattr(setup, "new_model", broken)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, max_bad_steps=2))
    with pytest.raises(loop.TrainingError, match="not finite 2 times in a row"):
        loop.train(run, tmp_path / "work")
    rows = [json.loads(line) for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"], row["skipped"]) for row in rows[1:]] == [(1, None, 1), (2, None, 2)]
    plot_losses(tmp_path / "work")


def test_failed_save_keeps_the_checkpoint_before(run, tmp_path, monkeypatch, capfd):
    save = loop.Checkpoints.save

    def save_or_fail(self, state, data):
        if int(state.step) == 4:
            raise OSError(28, "No space left on device")
        save(self, state, data)

    monkeypatch.setattr(loop.Checkpoints, "save", save_or_fail)
    assert loop.train(run, tmp_path / "work") == 6
    assert "step 4: checkpoint not written" in capfd.readouterr().err
    assert sorted(path.name for path in (tmp_path / "work" / "checkpoints").iterdir()) == ["2", "6"]


@pytest.mark.slow
def test_init_starts_from_weights_with_a_fresh_optimizer(run, tmp_path):
    loop.train(run, tmp_path / "first")
    loop.train(run, tmp_path / "second", init=tmp_path / "first")
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert second[1] < first[1] - 0.1
    assert list(second) == [1, 2, 3, 4, 5, 6]

    other = dataclasses.replace(run, model=dataclasses.replace(run.model, situ_beta=3.0))
    with pytest.raises(ConfigError, match="situ_beta"):
        loop.train(other, tmp_path / "third", init=tmp_path / "first")
    assert not (tmp_path / "third").exists()


@pytest.mark.slow
def test_changed_data_is_refused(run, tmp_path):
    two = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=2))
    loop.train(two, tmp_path / "work")
    (tmp_path / "texts" / "new.txt").write_text("one more document " * 10)
    with pytest.raises(ConfigError, match="fingerprint"):
        loop.train(two, tmp_path / "work")


@pytest.mark.slow
def test_context_stages_keep_tokens_per_batch_and_resume_at_a_border(run, tmp_path, monkeypatch):
    """8 rows of 32 tokens, then 4 of 64; a run stopped where the stage changes goes on as the straight one."""
    stages = (ContextStage(start=0.5, sequence_length=64),)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, context_stages=stages))
    shapes, put = [], loop.put
    monkeypatch.setattr(loop, "put", lambda batch, spec: shapes.append(batch.tokens.shape) or put(batch, spec))
    loop.train(run, tmp_path / "straight")
    assert [shape for shape in shapes if len(shape) == 3] == [(2, 4, 32)] * 3 + [(2, 2, 64)] * 3

    check = loop.Session.check

    def check_and_signal(self, bad, step):
        check(self, bad, step)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Session, "check", check_and_signal)
        assert loop.train(run, tmp_path / "stopped") == 3
    loop.train(run, tmp_path / "stopped")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")


def test_metrics_survive_a_damaged_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["model", "run"])
def test_damaged_checkpoint_is_one_line(run, tmp_path, damage):
    two = dataclasses.replace(run, train=dataclasses.replace(run.train, steps=2))
    loop.train(two, tmp_path / "work")
    step = tmp_path / "work" / "checkpoints" / "2"
    if damage == "model":
        (step / "model" / "_METADATA").unlink()
    else:
        (step / "run" / "metadata").write_text("[]")
    with pytest.raises(ConfigError, match=r"damaged or unfinished .*; remove .*/checkpoints/2 to go back"):
        loop.train(two, tmp_path / "work")


def test_one_process_per_directory(tmp_path):
    with locked(tmp_path):
        with pytest.raises(ConfigError, match="another k3 train"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


def test_more_stages_than_blocks_are_refused_before_anything_is_written(tmp_path):
    run = dataclasses.replace(small_run(tmp_path), mesh=MeshConfig(pipe=4, data=2))
    with pytest.raises(ConfigError, match="4 x 1: expected at most 2 chunks"):
        loop.train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()
