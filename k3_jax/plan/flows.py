"""What travels in a step, from the configuration and the sharding table: kind of collective, mesh axes, bytes.

Bytes are what one device sends, counted as in `pallas_kernels.common.traffic`. A compiled step may not hold a
collective of another kind or over other axes: `unlisted`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax

from k3_jax import sharding
from k3_jax.config import RunConfig
from k3_jax.nn.layout import leaf_names
from k3_jax.nn.transformer import K3
from k3_jax.plan.ledger import FLOAT, Sizes, shard_bytes
from k3_jax.plan.pod import Pod
from k3_jax.train.optimizer import MuonRule, rule_of
from pallas_kernels.common.tpu import Chip
from pallas_kernels.common.traffic import Collective

EXPERTS = ("moe.w1", "moe.w2", "moe.w3")


@dataclass(frozen=True)
class Flow:
    what: str
    kind: str
    axes: tuple[str, ...]
    bytes: float  # sent by one device in a step

    def seconds(self, chip: Chip, mesh: Mapping[str, int]) -> float:
        return self.bytes / bandwidth(self.kind, self.axes, chip, mesh)


def bandwidth(kind: str, axes: Iterable[str], chip: Chip, mesh: Mapping[str, int]) -> float:
    """Bytes per second that a device sends, uncalibrated: all links at once in rings; in an exchange of everybody with
    everybody over a cube of chips, a byte takes a link for each of 3/4 of an edge's hops."""
    if "all-to-all" not in kind:
        return chip.ici_bandwidth
    chips = math.prod(mesh[axis] for axis in axes) / chip.devices_per_chip
    return chip.ici_bandwidth / max(1.0, 0.75 * chips ** (1 / 3))


def flows(run: RunConfig, pod: Pod, model: K3) -> list[Flow]:
    """All of a step. `model` is abstract, made under the pod's mesh."""
    mesh, sizes = pod.mesh(run.mesh).shape, Sizes.of(run, pod)
    found = [*_weights(run, mesh, sizes, model), *_batch(run, mesh, sizes), *_muon(mesh, sizes, model)]
    kept = any(keep.name == "moe_output" for keep in run.train.activations)
    found += _experts(mesh, sizes, forward=1 if kept else 2) if run.model.moe else []
    found += _context(sizes) if sizes.ranks > 1 else []
    return [flow for flow in found if math.prod(mesh[axis] for axis in flow.axes) > 1]


def _weights(run: RunConfig, mesh, sizes: Sizes, model: K3) -> Iterable[Flow]:
    """Gathered where they are used, forward and backward; gradients scattered. One mesh axis after the other."""
    chunks = -(-run.data.sequence_length // sizes.ranks // run.train.loss_chunk)
    totals: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for name, leaf in zip(jax.tree.leaves(leaf_names(model)), jax.tree.leaves(model), strict=True):
        axes = _gathered_axes(leaf)
        if not axes or name == "embed":
            continue
        width = FLOAT if name == "moe.router" else sizes.width
        what = "head" if name == "lm_head" else "experts" if name in EXPERTS else "other weights"
        there, back = (2 * chunks, chunks) if name == "lm_head" else (2, 1)
        whole = shard_bytes(leaf) // FLOAT * width
        for axis in axes:
            whole *= mesh[axis]
            sent = sizes.micro * whole * (mesh[axis] - 1) / mesh[axis]
            total = totals.setdefault((what, axis), [0.0, 0.0])
            total[0] += there * sent
            total[1] += back * sent
    for (what, axis), (there, back) in totals.items():
        yield Flow(f"{what}: gathered", "all-gather", (axis,), there)
        yield Flow(f"{what}: gradients", "reduce-scatter", (axis,), back)


def _gathered_axes(leaf: jax.ShapeDtypeStruct) -> list[str]:
    """In the order in which they are gathered. Experts stay over their axis: it is the first letter's alone."""
    spec = sharding.spec_of(leaf)
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return [axis for axis in sharding.GATHERED if any(axis in entry and entry != ("expert",) for entry in entries)]


def _batch(run: RunConfig, mesh, sizes: Sizes) -> Iterable[Flow]:
    """Counts of the router, gradients of what is on every device, sums of the loss."""
    axes = tuple(axis for axis in sharding.ACTIVE["B"] + sharding.ACTIVE["T"] if mesh[axis] > 1)
    config, moe = run.model, run.model.moe
    counts = (config.num_layers - config.first_dense_layers) * moe.num_experts * (moe.quantile_bins + 1) if moe else 0
    vectors = 8 * config.num_layers * config.hidden_size
    yield Flow(
        "router's counts, gradients of vectors", "all-reduce", axes, 2 * sizes.micro * FLOAT * (counts + vectors)
    )
    # Tokens travel to the embedding's columns, columns back to the tokens' ranks (nn/embedding.py).
    axes = tuple(axis for axis in sharding.STORED["L"] if mesh[axis] > 1)
    ranks = math.prod(mesh[axis] for axis in axes)
    yield Flow("embedding: tokens", "all-gather", axes, sizes.micro * sizes.tokens * 4 * ranks)
    yield Flow("embedding: rows, and their gradients", "all-to-all", axes, 2 * sizes.micro * sizes.stream)


def _muon(mesh, sizes: Sizes, model: K3) -> Iterable[Flow]:
    """Shards to the owners of whole blocks and back; zeros fill up what the owners do not divide."""
    totals: dict[tuple[str, ...], float] = {}
    for name, leaf in zip(jax.tree.leaves(leaf_names(model)), jax.tree.leaves(model), strict=True):
        rule, axes = rule_of(name), tuple(reversed(_gathered_axes(leaf)))
        if isinstance(rule, MuonRule) and axes:
            blocks, owners = _blocks(rule, leaf), math.prod(mesh[axis] for axis in axes)
            filled = -(-blocks // owners) * owners / blocks
            totals[axes] = totals.get(axes, 0) + 2 * filled * shard_bytes(leaf) // FLOAT * sizes.width
    for axes, total in totals.items():
        yield Flow("Muon: blocks to their owners and back", "all-to-all", axes, total)


def _blocks(rule: MuonRule, leaf: jax.ShapeDtypeStruct) -> int:
    """Blocks of which a device has a part."""
    axes, inside = rule.axes.split(), {*rule.rows.split(), *rule.columns.split()}
    shape = leaf.sharding.shard_shape(leaf.shape)
    stacked, own = shape[: -len(axes)], shape[-len(axes) :]
    return math.prod(stacked) * math.prod(size for axis, size in zip(axes, own, strict=True) if axis not in inside)


def _experts(mesh, sizes: Sizes, forward: int) -> Iterable[Flow]:
    """Rows there and back, `forward` times (the backward pass recomputes what is not kept), then of z and the gradient;
    one borrowed expert per layer (docs/parallelism.md)."""
    moe, b = sizes.config.moe, sizes.width
    layers = sizes.micro * (sizes.config.num_layers - sizes.config.first_dense_layers)
    rows = sizes.tokens * moe.top_k * moe.latent_dim * b
    expert = 3 * moe.latent_dim * moe.expert_dim // sizes.tensor
    yield Flow("experts: rows", "ragged-all-to-all", ("expert",), layers * (2 * forward + 3) * rows)
    yield Flow(
        "experts: borrowed, and their gradients", "ragged-all-to-all", ("expert",), layers * expert * (3 * b + FLOAT)
    )
    counts = FLOAT * moe.num_experts * mesh["expert"]
    yield Flow("experts: counts", "all-gather", ("expert",), 2 * layers * counts)


def _context(sizes: Sizes) -> Iterable[Flow]:
    """Maps of the KDA state, inputs of the convolution, latents of MLA; next tokens."""
    config, ranks, axes = sizes.config, sizes.ranks, (sizes.rows_over,)
    kda, mla = config.num_layers - len(config.mla_layers), len(config.mla_layers)
    maps = 2 * config.kda.num_heads * config.kda.head_dim**2 * FLOAT // sizes.tensor
    yield Flow("KDA maps, convolution halos", "collective-permute", axes, 3 * kda * maps * ranks.bit_length())
    latents = sizes.tokens * ranks * config.mla.cache_dim * sizes.width
    yield Flow("MLA latents", "all-gather", axes, 2 * mla * latents)
    yield Flow("MLA latents: gradients", "reduce-scatter", axes, mla * latents)


# How XLA writes a reduce-scatter whose shards are not whole tiles: all of the sum, cut; rows from a neighbour.
INSTEAD_OF_SCATTER = ("all-reduce", "collective-permute")


def unlisted(found: Iterable[Collective], planned: Iterable[Flow]) -> list[Collective]:
    """Collectives of a compiled step whose kind and axes the plan does not list."""
    listed = {(flow.kind, flow.axes) for flow in planned}
    listed |= {(kind, axes) for scatter, axes in listed if scatter == "reduce-scatter" for kind in INSTEAD_OF_SCATTER}
    return [x for x in found if x.axes and (x.kind, x.axes) not in listed]
