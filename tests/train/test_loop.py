"""The training run as a whole, on a model of three layers: resume after a kill, refusal of another configuration."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from k3_jax.config import (
    ConfigError,
    DataConfig,
    K3Config,
    KDAConfig,
    MeshConfig,
    MLAConfig,
    MoEConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from k3_jax.mesh import make_mesh
from k3_jax.train import loop
from k3_jax.weights.orbax import MODEL, OPTIMIZER


class Killed(Exception):
    """Stands for kill -9: nothing is saved on the way out."""


@pytest.fixture
def run(tmp_path) -> RunConfig:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * 6)
    model = K3Config(
        vocab_size=256,
        hidden_size=16,
        num_layers=3,
        mla_layers=(2,),
        kda=KDAConfig(2, 8),
        mla=MLAConfig(2, 8, 8, 8, 4, 8),
        dense_dim=32,
        moe=MoEConfig(4, 2, 8, 8, 16, quantile_bins=32),
        attn_res_block=2,
    )
    return RunConfig(
        name="test",
        model=model,
        data=DataConfig(sequence_length=32, batch_size=8, source=str(texts)),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        train=TrainConfig(
            steps=6,
            checkpoint_every=2,
            log_every=1,
            eval_every=100,
            eval_batches=2,
            compute_dtype="float32",
            loss_chunk=32,
            grad_accumulation=2,
        ),
        mesh=MeshConfig(data=2, fsdp=2, tensor=2),
    )


def losses(workdir) -> dict[int, float]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


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
