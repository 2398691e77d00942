"""What a training step finds on a mesh: loss, gradients by name, router counts and biases by layer."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3_jax import sharding
from k3_jax.config import K3Config, Keep, MeshConfig
from k3_jax.mesh import make_mesh
from k3_jax.nn import layout, moe
from k3_jax.nn.transformer import K3
from k3_jax.train.packing import Batch
from k3_jax.train.step import accumulate, balance
from pallas_kernels.common.testing import assert_gradients_close
from tests.models import draw, quick_jit, run_of

SEED = 45  # of weights which leave no token undecided between two experts: see routing_margin


class Outcome(NamedTuple):
    loss: float
    gradients: dict[str, np.ndarray]
    counts: dict[int, np.ndarray]  # histogram of each MoE layer
    biases: dict[str, np.ndarray]  # after the step
    widths: dict[str, float]  # of a bin of the histograms that they come from


def packed(config: K3Config, lengths: tuple[int, ...], rows: int, length: int) -> Batch:
    """One micro-batch [rows, length] for each of `lengths`, with documents of random lengths, a third of which is
    padding; positions from its own length on are padding too."""
    rng, batches = np.random.default_rng(0), []
    for used in lengths:
        ids = np.cumsum(rng.random((rows, length)) < 0.2, axis=1)
        ids = np.where(ids % 3 == 2, -1, ids)
        ids = np.where(np.arange(length)[None] < used, ids, -1).astype(np.int32)
        mask = (ids >= 0) & (ids == np.roll(ids, -1, axis=1))
        mask[:, -1] = False
        tokens = rng.integers(0, config.vocab_size, (rows, length)).astype(np.int32)
        batches.append(Batch(tokens, ids, mask))
    return jax.tree.map(lambda *x: np.stack(x), *batches)


def make(config: K3Config, interleave: int, seed: int) -> K3:
    """A model with the same weights on every mesh."""
    like = jax.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0), interleave=interleave))
    rng = np.random.default_rng(seed)
    shapes = sorted(layout.abstract_layers(like, like.depth).items())
    named = {name: draw(name, x.shape, rng).astype(x.dtype) for name, x in shapes}
    return jax.jit(lambda named: layout.from_layers(named, like, like.depth))(named)


def outcome(
    config: K3Config, mesh: MeshConfig, batch: Batch, seed: int = SEED, activations: tuple[Keep, ...] = ()
) -> Outcome:
    """On as many of the fake devices as the mesh needs."""
    run = run_of(config, mesh)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, activations=activations))
    devices = jax.devices()[: int(np.prod(list(mesh.axes().values())))]
    with jax.set_mesh(make_mesh(mesh, devices)):
        model = make(config, mesh.interleave, seed)
        spec = PartitionSpec(None, *sharding.active("BT"))
        batch = jax.device_put(batch, NamedSharding(jax.sharding.get_mesh(), spec))

        @quick_jit
        def step(model, batch):
            loss, gradients, reports = accumulate(run, model, batch)
            named = layout.to_layers(gradients, model.depth)
            return loss, gradients, named, reports, biases_of(model), biases_of(balance(model, reports, run))

        loss, gradients, named, reports, before, after = step(model, batch)
        alike = jax.tree.map(lambda g, p: g.sharding.is_equivalent_to(p.sharding, p.ndim), gradients, model)
        assert all(jax.tree.leaves(alike)), "a gradient is not laid out like its parameter"
        counts = {
            int(numbers[*place]): np.asarray(report["router"].histogram)[*place]
            for group, runs in zip(model.depth.numbers, jax.device_get(reports), strict=True)
            for numbers, report in zip(group, runs, strict=True)
            if "router" in report
            for place in np.argwhere(numbers >= 0)
        }
        widths = {name: (float(np.ptp(x)) + 2) / config.moe.quantile_bins for name, x in jax.device_get(before).items()}
        return Outcome(float(loss), jax.device_get(named), counts, jax.device_get(after), widths)


def routing_margin(monkeypatch, model: K3, batch: Batch) -> float:
    """The smallest difference between the score of the last expert chosen and the next, over all tokens and layers."""
    margins, choose = [], moe._choose

    def watched(scores, bias, ids, *, moe):
        *_, last, following = jnp.moveaxis(jax.lax.top_k(scores + bias[None, None], moe.top_k + 1)[0], -1, 0)
        jax.debug.callback(margins.append, jnp.min(jnp.where(ids >= 0, last - following, 1.0)))
        return choose(scores, bias, ids, moe=moe)

    monkeypatch.setattr(moe, "_choose", watched)
    run = quick_jit(lambda tokens, ids: model(tokens, ids, dtype=jnp.float32))
    for rows in zip(batch.tokens, batch.segment_ids, strict=True):
        jax.block_until_ready(run(*rows))
    jax.effects_barrier()
    return float(min(margins))


def biases_of(model: K3) -> dict[str, jax.Array]:
    layers = layout.to_layers(model, model.depth)
    return {name: x for name, x in layers.items() if name.endswith("router_bias")}


def assert_same(actual: Outcome, expected: Outcome) -> None:
    """Loss to 1e-5, every gradient to 1e-4 relative RMS, as many scores counted, biases within a bin's width."""
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
    assert_gradients_close(actual.gradients, expected.gradients, 1e-4)
    assert actual.counts.keys() == expected.counts.keys()
    for layer, counts in expected.counts.items():
        np.testing.assert_array_equal(actual.counts[layer].sum(-1), counts.sum(-1))
    for name, bias in expected.biases.items():
        np.testing.assert_allclose(actual.biases[name], bias, rtol=0, atol=expected.widths[name])
