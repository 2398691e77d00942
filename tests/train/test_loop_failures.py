"""What a run does when something goes wrong: a signal, a model that diverges, a disk that is full, wrong weights."""

import dataclasses
import json
import os
import signal

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from k3_jax.config import ConfigError, MeshConfig, RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.train import loop
from tests.train.small_run import losses, small_run


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunConfig:
    monkeypatch.setattr(loop, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
    return dataclasses.replace(small_run(tmp_path), mesh=MeshConfig())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_stops(run, tmp_path, monkeypatch, number):
    check = loop.Session.check

    def check_and_signal(self, metrics, step):
        check(self, metrics, step)
        if step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loop.Session, "check", check_and_signal)
    assert loop.train(run, tmp_path / "work") == 3
    assert (tmp_path / "work" / "checkpoints" / "3" / "model").is_dir()
    assert list(losses(tmp_path / "work")) == [1, 2, 3]


def test_diverged_run_skips_and_ends(run, tmp_path, monkeypatch):
    new_model = loop.new_model

    def broken(run):
        model = new_model(run)
        model.embed = nnx.Param(model.embed[...] * jnp.nan)
        return model

    monkeypatch.setattr(loop, "new_model", broken)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, max_bad_steps=2))
    with pytest.raises(loop.TrainingError, match="not finite 2 times in a row"):
        loop.train(run, tmp_path / "work")
    rows = [json.loads(line) for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped"] for row in rows if "skipped" in row][-1] == 2


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


def test_init_starts_from_weights_with_a_fresh_optimizer(run, tmp_path):
    loop.train(run, tmp_path / "first")
    loop.train(run, tmp_path / "second", init=tmp_path / "first")
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert second[1] < first[1] - 0.1
    assert list(second) == [1, 2, 3, 4, 5, 6]

    other = dataclasses.replace(run, model=dataclasses.replace(run.model, situ_beta=3.0))
    with pytest.raises(ConfigError, match="situ_beta"):
        loop.train(other, tmp_path / "third", init=tmp_path / "first")
