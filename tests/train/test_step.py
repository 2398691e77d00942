"""One training step: micro-batches, precision, and what the metrics say."""

import dataclasses

import jax
import numpy as np
import pytest

from k3_jax.config import MeshConfig, RunConfig
from k3_jax.mesh import make_mesh
from k3_jax.nn.grouping import Depth
from k3_jax.nn.layout import to_layers
from k3_jax.train.packing import Batch
from k3_jax.train.state import TrainState, new_model, start
from k3_jax.train.step import accumulate, make_train_step, micro_batches
from tests.models import quick_jit
from tests.train.small_run import small_run


@pytest.fixture
def run(tmp_path) -> RunConfig:
    return dataclasses.replace(small_run(tmp_path), mesh=MeshConfig())


@pytest.fixture
def one_device():
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        yield


def batch_of(run: RunConfig, seed: int = 0) -> Batch:
    """Rows of two documents, the second of random length, with masks that differ from row to row."""
    rng, (B, T) = np.random.default_rng(seed), (run.data.batch_size, run.data.sequence_length)
    tokens = rng.integers(0, run.model.vocab_size, (B, T)).astype(np.int32)
    cut = rng.integers(1, T, B)[:, None]
    segment_ids = (np.arange(T)[None] >= cut).astype(np.int32)
    mask = np.ones((B, T), bool)
    mask[:, -1] = False
    mask[np.arange(B), cut[:, 0] - 1] = False
    mask[: B // 2] &= rng.random((B // 2, T)) < 0.3
    return Batch(tokens, segment_ids, mask)


def gradients(run: RunConfig, model, batch: Batch, count: int):
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, grad_accumulation=count))
    loss, grads, reports = quick_jit(lambda model, batch: accumulate(run, model, batch))(
        model, micro_batches(batch, count)
    )
    return float(loss), jax.device_get(to_layers(grads, model.depth)), jax.device_get(reports)


@pytest.mark.slow
def test_micro_batches_do_not_weigh(run, one_device):
    """Rows with few targets stand in other micro-batches than rows with many: the mean is over all targets."""
    model, batch = new_model(run), batch_of(run)
    loss, grads, reports = gradients(run, model, batch, 1)
    loss4, grads4, reports4 = gradients(run, model, batch, 4)
    assert abs(loss - loss4) < 1e-6
    scale = np.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    for name, g in grads.items():
        assert np.abs(g - grads4[name]).max() < 1e-5 * scale, name
    for a, b in zip(jax.tree.leaves(reports), jax.tree.leaves(reports4), strict=True):
        if a.dtype == np.int32:
            assert np.array_equal(a, b)  # the router's counts are pooled, whatever the micro-batches


@pytest.mark.slow
def test_router_bias_moves_after_the_step_only(run, one_device):
    """The step routes with the old bias; the new one is in the state, without mean, and untouched by the optimizer."""
    state, batch = start(run, new_model(run)), micro_batches(batch_of(run), 2)
    before = to_layers(state.model, Depth(run.model))["layers.1.moe.router_bias"]
    state, metrics = make_train_step(run)(state, batch)
    after = np.asarray(to_layers(state.model, Depth(run.model))["layers.1.moe.router_bias"])
    assert not before.any()
    assert np.abs(after).max() > 0
    assert abs(after.mean()) < 1e-6
    assert float(metrics["expert_load_max"]) >= float(metrics["expert_load_max_mean"]) >= 1


@pytest.mark.slow
def test_qk_clip_scales_heads_over_the_threshold(run, one_device):
    clipped = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, qk_clip=1e-6))
    batch, name = micro_batches(batch_of(run), 2), "layers.2.mla.q_b"
    plain = make_train_step(run)(start(run, new_model(run)), batch)[0]
    small = make_train_step(clipped)(start(clipped, new_model(clipped)), batch)[0]
    a, b = (np.abs(np.asarray(to_layers(s.model, Depth(run.model))[name])).max() for s in (plain, small))
    assert b < 0.1 * a


@pytest.mark.slow
def test_bfloat16_step_follows_float32(run, one_device):
    """The same first losses up to rounding; parameters and optimizer state stay float32."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        typed = dataclasses.replace(run, train=dataclasses.replace(run.train, compute_dtype=dtype))
        state: TrainState = start(typed, new_model(typed))
        step, losses[dtype] = make_train_step(typed), []
        for seed in range(3):
            state, metrics = step(state, micro_batches(batch_of(typed, seed), 2))
            losses[dtype].append(float(metrics["loss"]))
        assert {x.dtype for x in jax.tree.leaves(state.model)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=5e-3)
    assert losses["bfloat16"] != losses["float32"]
