"""The training run as a whole, on a model of three layers: resume after a kill, refusal of another configuration."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from k3_jax.config import ConfigError, MeshConfig, RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.overrides import to_json
from k3_jax.train import loop
from k3_jax.weights.orbax import MODEL, OPTIMIZER, find_step
from tests.train.small_run import losses, small_run


@pytest.fixture
def run(tmp_path) -> RunConfig:
    """16 steps on 8 devices, a checkpoint after every 4."""
    run = small_run(tmp_path)
    return dataclasses.replace(run, train=dataclasses.replace(run.train, steps=16, checkpoint_every=4))


def on_devices(monkeypatch, run: RunConfig, mesh: MeshConfig) -> RunConfig:
    """The run on as many of this process's devices as a mesh needs."""
    devices = jax.devices()[: math.prod(mesh.axes().values())]
    monkeypatch.setattr(loop, "make_mesh", lambda mesh: make_mesh(mesh, devices))
    return dataclasses.replace(run, mesh=mesh)


def arrays(workdir, step, item) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((workdir / "checkpoints" / str(step) / item).absolute())
    return {name: np.asarray(x) for name, x in tree.items()}


def killed_at(step: int, run: RunConfig, workdir: Path) -> None:
    """Train in a process of its own and kill -9 it when it reports `step`."""
    recipe = workdir.with_suffix(".json")
    recipe.write_text(json.dumps(to_json(run)))
    program = (
        "import json, sys; from pathlib import Path; from k3_jax.config import RunConfig; "
        "from k3_jax.overrides import from_json; from k3_jax.train.loop import train; "
        "train(from_json(RunConfig, json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))"
    )
    devices = math.prod(run.mesh.axes().values())
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if devices > 1:  # see conftest.py
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-c", program, str(recipe), str(workdir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment) as process:
        for line in process.stderr:
            if line.startswith(f"step {step}/".encode()):
                process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(), pytest.param(MeshConfig(data=2, fsdp=2, tensor=2), marks=pytest.mark.slow)],
    ids=["1_device", "8_devices"],
)
def test_killed_run_continues_bit_for_bit(run, mesh, tmp_path, monkeypatch):
    """16 steps at once; and killed with -9 after 11, of which the first 4 or 8 are saved."""
    run = on_devices(monkeypatch, run, mesh)
    loop.train(run, tmp_path / "straight")
    killed_at(11, run, tmp_path / "killed")
    assert find_step(tmp_path / "killed").name in ("4", "8")  # the second may still be being written
    loop.train(run, tmp_path / "killed")
    assert losses(tmp_path / "straight") == losses(tmp_path / "killed")
    for item in (MODEL, OPTIMIZER):
        a, b = arrays(tmp_path / "straight", 16, item), arrays(tmp_path / "killed", 16, item)
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[name], b[name]) for name in a)

    other = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, learning_rate=2e-2))
    with pytest.raises(ConfigError, match="optimizer.learning_rate"):
        loop.train(other, tmp_path / "killed")


@pytest.mark.slow
def test_run_continues_on_other_devices(run, tmp_path, monkeypatch):
    """16 steps on eight devices; and killed with -9 after 11, with the rest on four."""
    loop.train(run, tmp_path / "straight")
    killed_at(11, run, tmp_path / "moved")
    loop.train(on_devices(monkeypatch, run, MeshConfig(fsdp=2, tensor=2)), tmp_path / "moved")
    for name in ("loss", "held_out_loss"):
        straight, moved = losses(tmp_path / "straight", name), losses(tmp_path / "moved", name)
        assert straight.keys() == moved.keys()
        assert all(abs(moved[step] - loss) < 1e-4 for step, loss in straight.items())


def test_batch_that_does_not_split_is_refused(run, tmp_path):
    small = dataclasses.replace(run, data=dataclasses.replace(run.data, batch_size=4))
    with pytest.raises(ConfigError, match=r"data.batch_size = 4.*4 batch shards"):
        loop.train(small, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_experts_that_do_not_split_are_refused(run, tmp_path):
    train, mesh = dataclasses.replace(run.train, grad_accumulation=1), MeshConfig(expert=8)
    with pytest.raises(ConfigError, match=r"model.moe.num_experts = 4: expected a multiple of mesh.expert = 8"):
        loop.train(dataclasses.replace(run, train=train, mesh=mesh), tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("axis", "length", "fragments"), [("context", 36, 8), ("zigzag", 40, 16)])
def test_rows_that_cannot_be_cut_are_refused(axis, length, fragments, run, tmp_path):
    data = dataclasses.replace(run.data, sequence_length=length)
    odd = dataclasses.replace(run, mesh=MeshConfig(**{axis: 8}), data=data)
    message = f"sequence_length = {length}: expected a multiple of {fragments}, .* mesh.{axis} = 8"
    with pytest.raises(ConfigError, match=message):
        loop.train(odd, tmp_path / "work")
    assert not (tmp_path / "work").exists()
