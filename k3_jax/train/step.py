"""One optimizer step: micro-batches, update, router balance, and the metrics of it all."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from k3_jax import sharding
from k3_jax.config import RunConfig
from k3_jax.nn.balance import load_stats, updated_bias
from k3_jax.nn.moe import RouterStats
from k3_jax.nn.transformer import K3
from k3_jax.parallel.expert import TPU_OPTIONS
from k3_jax.train.loss import next_token_loss
from k3_jax.train.packing import Batch
from k3_jax.train.qk_clip import qk_clip
from k3_jax.train.schedule import learning_rate
from k3_jax.train.state import TrainState, optimizer_for
from pallas_kernels.common.dispatch import on_tpu

Metrics = dict[str, jax.Array]


def make_train_step(run: RunConfig) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A jitted step over a batch [micro-batches, B, T], for the mesh that is set.

    A loss, gradient or update that is not finite leaves the model and the optimizer as they were.
    """
    schedule = learning_rate(run.optimizer, run.train.steps)

    @partial(jax.jit, donate_argnums=0, compiler_options=tpu_options(run) if on_tpu() else None)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss, grads, reports = accumulate(run, state.model, batch)
        grad_norm = optax.tree.norm(grads)
        updates, optimizer = optimizer_for(run, state.model).update(grads, state.optimizer, state.model)
        model = optax.apply_updates(state.model, updates)
        model = balance(clip(model, reports, run), reports, run)
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(optax.tree.norm(updates))
        model, optimizer = keep(good, (model, optimizer), (state.model, state.optimizer))
        bad_in_row = jnp.where(good, 0, state.bad_in_row + 1)
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": schedule(state.updates + 1),
            "skipped": state.step + 1 - (state.updates + good),
            "bad_in_row": bad_in_row,
        }
        state = TrainState(state.step + 1, state.updates + good, bad_in_row, model, optimizer)
        return state, metrics | summary(reports, run.train.grad_accumulation)

    return train_step


def tpu_options(run: RunConfig) -> dict[str, str | bool]:
    """Of the compiler: those that expert parallelism needs, then the run's own."""
    words = {"true": True, "false": False}
    named = (option.split("=") for option in run.train.tpu_options)
    return TPU_OPTIONS | {name: words.get(value, value) for name, value in named}


def make_eval_step(run: RunConfig) -> Callable[[K3, Batch], tuple[jax.Array, jax.Array]]:
    """Sum of nats and number of targets of one batch [B, T]; the router's bias and counts are left alone."""

    @jax.jit
    def eval_step(model: K3, batch: Batch):
        h, _ = model.hidden(batch.tokens, batch.segment_ids, jnp.dtype(run.train.compute_dtype))
        return next_token_loss(model, h, batch.tokens, batch.loss_mask, run.train.loss_chunk, z_loss=0.0)

    return eval_step


def accumulate(run: RunConfig, model: K3, batch: Batch):
    """Mean loss per target and its gradient (float32) over all micro-batches, and the layers' reports.

    Sums are divided once by the number of targets of the whole batch, so the cut into micro-batches does not weigh.
    """

    def loss_sum(model, micro: Batch):
        h, reports = model.hidden(micro.tokens, micro.segment_ids, jnp.dtype(run.train.compute_dtype))
        chunk, z_loss = run.train.loss_chunk, run.train.z_loss
        total, count = next_token_loss(model, h, micro.tokens, micro.loss_mask, chunk, z_loss)
        return total, (count, reports)

    def one(micro):
        # The embedding and the head, gathered, would outlive every micro-batch: 7 GB at K3's size.
        model_now, micro = jax.lax.optimization_barrier((model, micro))
        (total, (count, reports)), grads = jax.value_and_grad(loss_sum, has_aux=True)(model_now, micro)
        return total, count, jax.tree.map(lambda g: g.astype(jnp.float32), grads), reports

    def add(carry, micro):
        total, count, grads, reports = carry
        new_total, new_count, new_grads, new_reports = one(micro)
        grads = jax.tree.map(jnp.add, grads, new_grads)
        return (total + new_total, count + new_count, grads, merge(reports, new_reports)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], batch))
    nothing = jax.tree_util.tree_map_with_path(_nothing, shapes)
    (total, count, grads, reports), _ = jax.lax.scan(add, nothing, batch)
    count = jnp.maximum(count, 1).astype(jnp.float32)
    return total / count, jax.tree.map(lambda g: g / count, grads), reports


def _nothing(path, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """What adding a micro-batch starts from: zeros, and -inf where `merge` takes the maximum."""
    largest = any(getattr(key, "key", None) == "max_logit" for key in path)
    value = jnp.full(shape.shape, -jnp.inf if largest else 0, shape.dtype)
    return sharding.place(value, sharding.spec_of(shape))


def merge(a: list, b: list) -> list:
    """Reports of two micro-batches: counts and entropies add up, the larger of the largest logits stays."""

    def run(a: dict, b: dict) -> dict:
        return {
            name: jnp.maximum(a[name], b[name]) if name == "max_logit" else jax.tree.map(jnp.add, a[name], b[name])
            for name in a
        }

    return [[run(x, y) for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]


def keep(good: jax.Array, new, old):
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def clip(model: K3, reports: list, run: RunConfig) -> K3:
    """K2's QK-clip on every MLA layer, if it is on."""
    if run.optimizer.qk_clip is None:
        return model
    scale = partial(qk_clip, threshold=run.optimizer.qk_clip, nope_dim=run.model.mla.qk_nope_head_dim)
    model = jax.tree.map(lambda x: x, model)
    for block, report in _runs(model, reports):
        if "max_logit" in report:
            q_b, kv_b = scale(block.mla.q_b[...], block.mla.kv_b[...], report["max_logit"])
            block.mla.q_b, block.mla.kv_b = nnx.Param(q_b), nnx.Param(kv_b)
    return model


def balance(model: K3, reports: list, run: RunConfig) -> K3:
    """Quantile Balancing: the next step's router biases from this step's pooled counts."""
    model = jax.tree.map(lambda x: x, model)
    for block, report in _runs(model, reports):
        if "router" in report:
            bias = updated_bias(report["router"].histogram, block.moe.router_bias[...], run.model.moe.top_k)
            block.moe.router_bias = nnx.Param(bias)
    return model


def summary(reports: list, micro_batches: int) -> Metrics:
    """Scalars over all layers. `expert_load_max` is the fullest expert over the mean of its layer."""
    flat = [report for runs in reports for report in runs]
    entropy = jnp.concatenate([report["attn_res_entropy"].reshape(-1) for report in flat])
    metrics = {"attn_res_entropy": entropy.mean() / micro_batches}
    routers: list[RouterStats] = [report["router"] for report in flat if "router" in report]
    if routers:
        load = jnp.concatenate([stats.load.reshape(-1, stats.load.shape[-1]) for stats in routers])
        stats = load_stats(load)
        metrics |= {
            "expert_load_max": stats.max_violation.max() + 1,
            "expert_load_max_mean": stats.max_violation.mean() + 1,
            "dead_experts": stats.dead_fraction.mean(),
        }
    logits = [report["max_logit"].max() for report in flat if "max_logit" in report]
    return metrics | ({"max_logit": jnp.stack(logits).max()} if logits else {})


def _runs(model: K3, reports: list):
    for blocks, stage in zip(model.stages, reports, strict=True):
        yield from zip(blocks, stage, strict=True)


def micro_batches(batch: Batch, count: int) -> Batch:
    """[B, T] -> [count, B / count, T]."""
    return Batch(*(x.reshape(count, -1, x.shape[1]) for x in batch))
