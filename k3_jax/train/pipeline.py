"""Training on a pipeline: the ticks of `parallel.schedule`, with K3's chunks of layers as stages.

A backward pass starts from the rows in the pool, runs its stage forward again and keeps the input of each layer, as on
one rank (`nn.depth`). Autodiff never sees the ticks: what a rank holds does not grow with the number of micro-batches.
The embedding belongs to the first stage; the head and the loss to the backward pass of the last one, which is the only
time that the last stage runs: the head takes the place of its forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from k3_jax import sharding
from k3_jax.config import RunConfig
from k3_jax.nn import depth as layers
from k3_jax.nn.grouping import Depth
from k3_jax.nn.transformer import K3
from k3_jax.parallel import pipeline
from k3_jax.parallel.pipeline import Rows
from k3_jax.parallel.schedule import IDLE, Passes, Schedule
from k3_jax.train.loss import next_token_loss
from k3_jax.train.packing import Batch
from k3_jax.train.reports import Reports, merge, nothing

EVERYWHERE, RANKS = PartitionSpec(), PartitionSpec(pipeline.AXIS)


def schedule_of(depth: Depth, micro_batches: int) -> Schedule:
    rows = depth.config.num_attn_res_blocks
    return Schedule(depth.pipe, depth.interleave, micro_batches, depth.first_rows(), rows)


def gradients(run: RunConfig, model: K3, batch: Batch) -> tuple[Float[Array, ""], K3, Reports]:
    """Sum of nats over all micro-batches [M, B, T], its gradient (float32), and the layers' reports."""

    def ticks(rank: "Rank", schedule: Schedule):
        passes = _of_rank((schedule.forward, schedule.backward), axis=1)
        carry, _ = jax.lax.scan(lambda carry, both: (rank.tick(carry, *both), None), rank.start(), passes)
        total, dends = jax.lax.psum((carry.total, carry.dends), pipeline.AXIS)
        return total, dends, *jax.tree.map(lambda x: x[None], (carry.dgroups, carry.reports))

    total, dends, dgroups, reports = _on_ranks(ticks, run, model, batch, (EVERYWHERE, EVERYWHERE, RANKS, RANKS))
    dends.groups = nnx.List([nnx.List(runs) for runs in dgroups])
    return total, dends, reports


def evaluate(run: RunConfig, model: K3, batch: Batch) -> Float[Array, ""]:
    """Sum of nats over all micro-batches [M, B, T]."""

    def ticks(rank: "Rank", schedule: Schedule):
        start, (passes,) = rank.start(), _of_rank((schedule.forward,), axis=1)
        (_, _, total), _ = jax.lax.scan(rank.score, (start.pool, start.arrived, start.total), passes)
        return jax.lax.psum(total, pipeline.AXIS)

    return _on_ranks(ticks, run, model, batch, EVERYWHERE)


def _on_ranks(ticks: Callable, run: RunConfig, model: K3, batch: Batch, out_specs: Any) -> Any:
    """`ticks(rank, schedule)` on every rank of the pipeline; the mesh's other axes stay Explicit."""
    ends = jax.tree.map(lambda x: x, model)
    ends.groups = nnx.List([])
    schedule = schedule_of(model.depth, batch.tokens.shape[0])

    def of_rank(ends, groups, batch):
        groups, numbers = jax.tree.map(lambda x: x[0], groups), _of_rank(model.depth.numbers, axis=0)
        return ticks(Rank(run, schedule, model.depth, ends, groups, numbers, batch), schedule)

    run_all = jax.shard_map(
        of_rank,
        in_specs=(EVERYWHERE, RANKS, EVERYWHERE),
        out_specs=out_specs,
        axis_names={pipeline.AXIS},
        # With checks, shard_maps inside name `pipe` in the layout of what they keep for the backward pass (JAX 0.12).
        check_vma=False,
    )
    return run_all(ends, [list(runs) for runs in model.groups], batch)


def _of_rank(tables: Any, axis: int) -> Any:
    """This rank's part of tables, as arrays."""
    rank = jax.lax.axis_index(pipeline.AXIS)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(jnp.asarray(x), rank, axis, keepdims=False), tables)


class Stage(NamedTuple):
    """A chunk in one pass: its weights and its layers' numbers, its place in the model, and what it works on."""

    blocks: layers.Groups
    numbers: layers.Numbers
    row: Int[Array, ""]  # the bank's row that is its input
    next_row: Int[Array, ""]  # that which its output becomes
    first: Array
    last: Array
    micro: Batch


class Found(NamedTuple):
    """What a backward pass finds. `dbank` holds the cotangents of the rows that the stage read, its input's too."""

    total: Float[Array, ""]
    dends: K3
    dblocks: layers.Groups
    reports: Reports
    dbank: Rows


class Carry(NamedTuple):
    """What a rank carries from tick to tick. Gradients and reports have an axis of chunks in front."""

    pool: Rows
    returns: Rows  # float32
    arrived: Rows  # from the stage before, the newest row first
    returned: Rows  # from the stage after, likewise; float32
    total: Float[Array, ""]
    dends: K3
    dgroups: layers.Groups
    reports: Reports


@dataclass(frozen=True)
class Rank:
    """One rank's share of the model, stacked [chunk, repeat, count, ...], and its work."""

    run: RunConfig
    schedule: Schedule
    depth: Depth
    ends: K3  # the model without its layers
    groups: layers.Groups
    numbers: layers.Numbers
    batch: Batch

    def start(self) -> Carry:
        passes = _of_rank(jax.tree.map(lambda x: x[0], self.schedule.forward), axis=0)
        r = jax.eval_shape(lambda: self.embed(self.ends, self.stage(passes).micro))
        zeros = partial(pipeline.zeros, like=r)
        pool = zeros(self.schedule.pool + 1, r.dtype)
        through = jax.eval_shape(lambda: self.through(self.stage(passes), pipeline.read(pool, passes.rows)))
        reports = nothing(through[2])
        chunks = lambda x: jnp.broadcast_to(x[None], (self.schedule.interleave, *x.shape))  # noqa: E731
        n = self.schedule.message
        return Carry(
            pool,
            zeros(self.schedule.returns + 1, jnp.float32),
            zeros(n, r.dtype),
            zeros(n, jnp.float32),
            jnp.zeros(()),
            *jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), (self.ends, self.groups)),
            jax.tree.map(chunks, reports),
        )

    def tick(self, carry: Carry, forward: Passes, backward: Passes) -> Carry:
        pool, message = self.forward(carry.pool, carry.arrived, forward)
        carry, back = self.backward(carry._replace(pool=pool), backward)
        return carry._replace(
            arrived=pipeline.send_on(message, self.schedule), returned=pipeline.send_back(back, self.schedule)
        )

    def score(self, carry, passes: Passes):
        """A tick without a backward pass; the last stage's forward pass ends in the loss."""
        pool, arrived, total = carry
        stage, busy = self.stage(passes), passes.micro_batch != IDLE
        pool, message = self.forward(pool, arrived, passes)
        bank = pipeline.read(pool, passes.rows)
        nats = _if(
            busy & stage.last, lambda bank: self.nats(stage.micro, self.ends, *self.through(stage, bank)[:2]), bank
        )
        return (pool, pipeline.send_on(message, self.schedule), total + nats), None

    def forward(self, pool: Rows, arrived: Rows, passes: Passes) -> tuple[Rows, Rows]:
        """The pool with what arrived, and the message to the next stage."""
        stage, busy = self.stage(passes), passes.micro_batch != IDLE
        enters = busy & stage.first
        newest = jax.lax.cond(enters, lambda: self.embed(self.ends, stage.micro), lambda: arrived[0])
        pool = pipeline.write(pool, passes.fresh, [newest, *arrived[1:]])

        def go(bank):
            r, bank, _, _ = self.through(stage, bank)
            return pipeline.newest(bank, r, stage.next_row, self.schedule.message)

        return pool, _if(busy & ~stage.last, go, pipeline.read(pool, passes.rows))

    def backward(self, carry: Carry, passes: Passes) -> tuple[Carry, Rows]:
        """The carry with what this pass found, and the message to the stage before."""
        stage, busy, v = self.stage(passes), passes.micro_batch != IDLE, passes.chunk
        bank = pipeline.read(carry.pool, passes.rows)
        found = self.find(stage, busy, bank, carry.returned)
        newest = pipeline.newest(found.dbank, pipeline.row_of(found.dbank, stage.row), stage.row, self.schedule.message)
        back = newest + pipeline.read(carry.returns, passes.collected)
        returns = pipeline.write(carry.returns, passes.collected, jnp.zeros_like(back))
        of_embedding = _if(busy & stage.first, partial(self.into_embedding, stage.micro), back[0])
        kept = carry._replace(
            returns=pipeline.add(returns, passes.returned, found.dbank),
            total=carry.total + found.total,
            dends=jax.tree.map(lambda *parts: sum(parts), carry.dends, found.dends, of_embedding),
            dgroups=jax.tree.map(lambda x, y: _put(x, _chunk(x, v) + y, v), carry.dgroups, found.dblocks),
            reports=self.pooled(carry.reports, found.reports, v),
        )
        return kept, back

    def find(self, stage: Stage, busy: Array, bank: Rows, returned: Rows) -> Found:
        differentiate = partial(self.differentiate, stage, bank, returned)

        def rest():
            shapes = jax.eval_shape(differentiate)
            zeros = jax.tree.map(sharding.zeros_like, shapes)
            return zeros._replace(reports=nothing(shapes.reports))

        return jax.lax.cond(busy, differentiate, rest)

    def differentiate(self, stage: Stage, bank: Rows, returned: Rows) -> Found:
        r, bank, reports, kept = self.through(stage, bank)
        total, dends, dr, dbank = jax.lax.cond(
            stage.last, partial(self.of_loss, stage.micro), partial(self.of_message, stage), r, bank, returned
        )
        dblocks, dr, dbank = layers.backward(
            self.depth,
            self.run.train.activations,
            stage.blocks,
            stage.numbers,
            bank,
            kept,
            stage.micro.segment_ids,
            dr,
            dbank,
        )
        dbank = pipeline.write(dbank, stage.row[None], dr[None])
        return Found(total, dends, _float32(dblocks), reports, dbank)

    def of_loss(self, micro: Batch, r, bank: Rows, returned: Rows):
        """(nats, gradient of the ends, dr, dbank) of the last stage's output."""
        nats, vjp = jax.vjp(partial(self.nats, micro), self.ends, r, bank)
        dends, dr, dbank = vjp(jnp.ones_like(nats))
        return nats, _float32(dends), dr, dbank.astype(jnp.float32)

    def of_message(self, stage: Stage, r, bank: Rows, returned: Rows):
        """The same of another stage's output: what the next one wants of it and of the bank."""
        dends = _float32(jax.tree.map(jnp.zeros_like, self.ends))
        dbank = pipeline.in_place(returned, stage.next_row, self.schedule.num_rows)
        return jnp.zeros(()), dends, returned[0].astype(r.dtype), dbank

    def into_embedding(self, micro: Batch, dr: Float[Array, "B T D"]) -> K3:
        r, vjp = jax.vjp(lambda ends: self.embed(ends, micro), self.ends)
        return _float32(vjp(dr.astype(r.dtype))[0])

    def stage(self, passes: Passes) -> Stage:
        v, P, last = passes.chunk, self.schedule.pipe, self.schedule.pipe * self.schedule.interleave - 1
        number = P * v + jax.lax.axis_index(pipeline.AXIS)
        rows = jnp.asarray((*self.schedule.first_rows, self.schedule.num_rows))
        blocks, numbers = jax.tree.map(lambda x: _chunk(x, v), (self.groups, self.numbers))
        take = partial(jax.lax.dynamic_index_in_dim, index=jnp.maximum(passes.micro_batch, 0), axis=0, keepdims=False)
        micro = jax.tree.map(lambda x: sharding.place(take(x), sharding.active("BT")), self.batch)
        return Stage(blocks, numbers, rows[number], rows[number + 1], number == 0, number == last, micro)

    def embed(self, ends: K3, micro: Batch) -> Float[Array, "B T D"]:
        return ends.embedding(micro.tokens, jnp.dtype(self.run.train.compute_dtype))

    def through(self, stage: Stage, bank: Rows):
        """(r, bank, reports, what is kept) of the stage's layers."""
        r = pipeline.row_of(bank, stage.row)
        policy = self.run.train.activations
        return layers.forward(self.depth, policy, stage.blocks, stage.numbers, r, bank, stage.micro.segment_ids)

    def nats(self, micro: Batch, ends: K3, r: Float[Array, "B T D"], bank: Rows) -> Float[Array, ""]:
        train, h = self.run.train, ends.read_out(r, bank)
        return next_token_loss(ends, h, micro.tokens, micro.loss_mask, train.loss_chunk, train.z_loss)[0]

    @staticmethod
    def pooled(reports: Reports, more: Reports, v) -> Reports:
        pooled = merge(jax.tree.map(lambda x: _chunk(x, v), reports), more)
        return jax.tree.map(lambda x, y: _put(x, y, v), reports, pooled)


def _if(condition: Array, fn: Callable, *args) -> Any:
    """fn(*args), or zeros without computing it."""
    fn = partial(fn, *args)
    return jax.lax.cond(condition, fn, lambda: jax.tree.map(sharding.zeros_like, jax.eval_shape(fn)))


def _float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _chunk(x: Array, v: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(x, v, 0, keepdims=False)


def _put(x: Array, part: Array, v: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, v, 0)
