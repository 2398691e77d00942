"""One optimizer step: micro-batches, update, router balance, and the metrics of it all."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from k3_jax import sharding
from k3_jax.config import RunConfig
from k3_jax.nn.balance import updated_bias
from k3_jax.nn.transformer import K3
from k3_jax.parallel.expert import TPU_OPTIONS
from k3_jax.parallel.fragments import arranged
from k3_jax.train import pipeline
from k3_jax.train.loss import next_token_loss
from k3_jax.train.packing import Batch
from k3_jax.train.qk_clip import qk_clip
from k3_jax.train.reports import Metrics, Reports, blocks_and_reports, merge, nothing, summary
from k3_jax.train.schedule import learning_rate
from k3_jax.train.state import TrainState, optimizer_for
from pallas_kernels.common.dispatch import on_tpu


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
        return state, metrics | summary(model.depth, reports, run.train.grad_accumulation)

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
        if model.depth.lead:
            whole = jax.tree.map(lambda x: sharding.place(x, PartitionSpec()), batch)  # numbers only: no activations
            micros = micro_batches(whole, run.train.grad_accumulation)
            return pipeline.evaluate(run, model, Batch(*map(arranged, micros))), batch.loss_mask.sum()
        batch = Batch(*map(arranged, batch))
        h, _ = model.hidden(batch.tokens, batch.segment_ids, jnp.dtype(run.train.compute_dtype))
        return next_token_loss(model, h, batch.tokens, batch.loss_mask, run.train.loss_chunk, z_loss=0.0)

    return eval_step


def accumulate(run: RunConfig, model: K3, batch: Batch) -> tuple[jax.Array, K3, Reports]:
    """Mean loss per target and its gradient (float32) over all micro-batches, and the layers' reports.

    Sums are divided once by the number of targets of the whole batch, so the cut into micro-batches does not weigh.
    """
    batch = Batch(*map(arranged, batch))
    gradients = pipeline.gradients if model.depth.lead else one_after_the_other
    total, grads, reports = gradients(run, model, batch)
    count = jnp.maximum(batch.loss_mask.sum(), 1).astype(jnp.float32)
    return total / count, jax.tree.map(lambda g: g / count, grads), reports


def one_after_the_other(run: RunConfig, model: K3, batch: Batch) -> tuple[jax.Array, K3, Reports]:
    """Sum of nats over all micro-batches, its gradient (float32), and the reports."""

    def one(micro):
        # The embedding and the head, gathered, would outlive every micro-batch: 7 GB at K3's size.
        now, micro = jax.lax.optimization_barrier((model, micro))
        nats = jax.value_and_grad(partial(sum_of_nats, run), has_aux=True)
        (total, reports), grads = nats(now, micro)
        return total, jax.tree.map(lambda g: g.astype(jnp.float32), grads), reports

    def add(carry, micro):
        (total, grads, reports), (new_total, new_grads, new_reports) = carry, one(micro)
        return (total + new_total, jax.tree.map(jnp.add, grads, new_grads), merge(reports, new_reports)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], batch))
    start = *jax.tree.map(sharding.zeros_like, shapes[:-1]), nothing(shapes[-1])
    return jax.lax.scan(add, start, batch)[0]


def sum_of_nats(run: RunConfig, model: K3, micro: Batch) -> tuple[jax.Array, Reports]:
    train = run.train
    h, reports = model.hidden(micro.tokens, micro.segment_ids, jnp.dtype(train.compute_dtype), train.activations)
    return next_token_loss(model, h, micro.tokens, micro.loss_mask, train.loss_chunk, train.z_loss)[0], reports


def keep(good: jax.Array, new, old):
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def clip(model: K3, reports: Reports, run: RunConfig) -> K3:
    """K2's QK-clip on every MLA layer, if it is on."""
    if run.optimizer.qk_clip is None:
        return model
    scale = partial(qk_clip, threshold=run.optimizer.qk_clip, nope_dim=run.model.mla.qk_nope_head_dim)
    model = jax.tree.map(lambda x: x, model)
    for block, report in blocks_and_reports(model, reports):
        if "max_logit" in report:
            q_b, kv_b = scale(block.mla.q_b[...], block.mla.kv_b[...], report["max_logit"])
            block.mla.q_b, block.mla.kv_b = nnx.Param(q_b), nnx.Param(kv_b)
    return model


def balance(model: K3, reports: Reports, run: RunConfig) -> K3:
    """Quantile Balancing: the next step's router biases from this step's pooled counts."""
    model = jax.tree.map(lambda x: x, model)
    for block, report in blocks_and_reports(model, reports):
        if "router" in report:
            bias = updated_bias(report["router"].histogram, block.moe.router_bias[...], run.model.moe.top_k)
            block.moe.router_bias = nnx.Param(bias)
    return model


def micro_batches(batch: Batch, count: int) -> Batch:
    """[B, T] -> [count, B / count, T]."""
    return Batch(*(x.reshape(count, -1, x.shape[1]) for x in batch))
