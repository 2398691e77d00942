"""What the layers report of a batch: router counts, AttnRes entropies, largest logits. Over micro-batches, and in all.

Reports stand as the layers are stacked: per group and run a dict of arrays [*lead, repeat, count, ...] (`nn.grouping`).
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from k3_jax import sharding
from k3_jax.nn.balance import load_stats
from k3_jax.nn.block import Block
from k3_jax.nn.grouping import Depth
from k3_jax.nn.transformer import K3

Reports = list[list[dict]]
Metrics = dict[str, jax.Array]


def nothing(shapes: Reports) -> Reports:
    """What adding up starts from: zeros, and -inf where `merge` takes the maximum."""

    def one(name: str, report):
        lowest = -jnp.inf if name == "max_logit" else 0
        return jax.tree.map(lambda x: sharding.zeros_like(x) + lowest, report)

    return [[{name: one(name, x) for name, x in report.items()} for report in runs] for runs in shapes]


def merge(a: Reports, b: Reports) -> Reports:
    """Reports of two micro-batches: counts and entropies add up, the larger of the largest logits stays."""

    def run(a: dict, b: dict) -> dict:
        return {
            name: jnp.maximum(a[name], b[name]) if name == "max_logit" else jax.tree.map(jnp.add, a[name], b[name])
            for name in a
        }

    return [[run(x, y) for x, y in zip(xs, ys, strict=True)] for xs, ys in zip(a, b, strict=True)]


def blocks_and_reports(model: K3, reports: Reports) -> Iterator[tuple[Block, dict]]:
    """The stacks of a model with theirs."""
    for blocks, runs in zip(model.groups, reports, strict=True):
        yield from zip(blocks, runs, strict=True)


def summary(depth: Depth, reports: Reports, micro_batches: int) -> Metrics:
    """Scalars over all layers. `expert_load_max` is the fullest expert over the mean of its layer."""
    of = {name: _by_layer(depth, reports, name) for name in ("attn_res_entropy", "router", "max_logit")}
    metrics = {"attn_res_entropy": jnp.concatenate(of["attn_res_entropy"]).mean() / micro_batches}
    if of["router"]:
        stats = load_stats(jnp.concatenate([router.load for router in of["router"]]))
        metrics |= {
            "expert_load_max": stats.max_violation.max() + 1,
            "expert_load_max_mean": stats.max_violation.mean() + 1,
            "dead_experts": stats.dead_fraction.mean(),
        }
    logits = [peak.max() for peak in of["max_logit"]]
    return metrics | ({"max_logit": jnp.stack(logits).max()} if logits else {})


def _by_layer(depth: Depth, reports: Reports, name: str) -> list:
    """The reports of this name with one axis of layers; places of a stack without a layer are left out."""

    def flat(numbers, x):
        x = sharding.place(x, PartitionSpec())
        return x.reshape(-1, *x.shape[numbers.ndim :])[np.flatnonzero(numbers.reshape(-1) >= 0)]

    return [
        jax.tree.map(lambda x: flat(numbers, x), report[name])  # noqa: B023
        for group, runs in zip(depth.numbers, reports, strict=True)
        for numbers, report in zip(group, runs, strict=True)
        if name in report
    ]
