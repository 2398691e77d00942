"""The training run as a whole, on a model of three layers: resume after a kill, refusal of another configuration."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from k3_jax.config import ConfigError, MeshConfig, RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.train import loop
from k3_jax.weights.orbax import MODEL, OPTIMIZER
from tests.train.small_run import losses, small_run


class Killed(Exception):
    """Stands for kill -9: nothing is saved on the way out."""


@pytest.fixture
def run(tmp_path) -> RunConfig:
    return small_run(tmp_path)


def arrays(workdir, step, item) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((workdir / "checkpoints" / str(step) / item).absolute())
    return {name: np.asarray(x) for name, x in tree.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_killed_run_continues_bit_for_bit(run, tmp_path, monkeypatch):
    loop.train(run, tmp_path / "straight")

    check = loop.Session.check

    def kill(self, metrics, step):
        check(self, metrics, step)
        if step == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop.Session, "check", kill)
        with pytest.raises(Killed):
            loop.train(run, tmp_path / "killed")
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    loop.train(run, tmp_path / "killed")

    assert losses(tmp_path / "straight") == losses(tmp_path / "killed")
    for item in (MODEL, OPTIMIZER):
        a, b = arrays(tmp_path / "straight", 6, item), arrays(tmp_path / "killed", 6, item)
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[name], b[name]) for name in a)

    four = dataclasses.replace(run, mesh=MeshConfig(fsdp=2, tensor=2))
    monkeypatch.setattr(loop, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:4]))
    loop.train(four, tmp_path / "moved")
    moved = losses(tmp_path / "moved")
    assert all(abs(moved[step] - loss) < 1e-4 for step, loss in losses(tmp_path / "straight").items())

    other = dataclasses.replace(four, optimizer=dataclasses.replace(run.optimizer, learning_rate=2e-2))
    with pytest.raises(ConfigError, match="optimizer.learning_rate"):
        loop.train(other, tmp_path / "killed")


def test_batch_that_does_not_split_is_refused(run, tmp_path):
    small = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=4))
    with pytest.raises(ConfigError, match=r"data.batch_size = 4.*4 batch shards"):
        loop.train(small, tmp_path / "work")
    assert not (tmp_path / "work").exists()
