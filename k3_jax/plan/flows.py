"""What travels in a step, from the configuration and the sharding table: kind of collective, mesh axes, bytes.

Bytes are what one device sends, counted as in `pallas_kernels.common.traffic`; on a pipeline each rank's are its own. A
compiled step may not hold a collective of another kind or over other axes: `unlisted`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax

from k3_jax import sharding
from k3_jax.config import RunConfig
from k3_jax.nn.transformer import K3
from k3_jax.parallel.schedule import Schedule
from k3_jax.plan.pod import Pod
from k3_jax.plan.sizes import FLOAT, Sizes, shard_bytes
from k3_jax.plan.stages import Rank, Stages, tensors
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


def flows(run: RunConfig, pod: Pod, model: K3) -> list[list[Flow]]:
    """All of a step, for each rank of the pipeline. `model` is abstract, made under the pod's mesh."""
    return [list(_of_rank(run, pod, model, rank)) for rank in Stages.of(run).ranks()]


def _of_rank(run: RunConfig, pod: Pod, model: K3, rank: Rank) -> Iterator[Flow]:
    mesh, sizes = pod.mesh(run.mesh).shape, Sizes.of(run, pod)
    found = [*_weights(run, mesh, sizes, model, rank), *_batch(run, mesh, sizes, model, rank)]
    found += [*_muon(mesh, sizes, model), *_tensor(mesh, sizes, rank)]
    kept = any(keep.name == "moe_output" for keep in run.train.activations)
    found += _experts(mesh, sizes, rank, kept) if run.model.moe else []
    found += _context(sizes, rank) if sizes.ranks > 1 else []
    found += _pipeline(mesh, sizes, rank, model) if mesh["pipe"] > 1 else []
    if mesh["pipe"] > 1 or mesh["tensor"] > 1:  # elsewhere the norm is summed with other things over the same axes
        found.append(Flow("norm of the gradient", "all-reduce", tuple(a for a in mesh if mesh[a] > 1), 2 * FLOAT))
    return (flow for flow in found if math.prod(mesh[axis] for axis in flow.axes) > 1)


def _weights(run: RunConfig, mesh, sizes: Sizes, model: K3, rank: Rank) -> Iterable[Flow]:
    """Gathered where they are used, forward and backward; gradients scattered."""
    chunks = -(-run.data.sequence_length // sizes.ranks // run.train.loss_chunk)
    totals = Counter()
    for name, leaf, place in tensors(model):
        if name == "embed" or (name == "lm_head" and not rank.last):
            continue
        filled, passes = (float(chunks), 2.0 * chunks) if place is None else rank.in_stack(place)
        for flow in _of_weight(name, leaf, filled, passes, mesh, sizes):
            totals[flow.what, flow.kind, flow.axes] += sizes.micro * flow.bytes
    return [Flow(*key, total) for key, total in totals.items()]


def _of_weight(name: str, leaf, filled: float, passes: float, mesh, sizes: Sizes) -> Iterator[Flow]:
    """In a micro-batch that uses it `filled` times and gathers it for `passes`. One mesh axis after the other; on a
    pipeline gradients are added up whole, but for those of experts, over all tokens at once (sharding.use)."""
    what = "head" if name == "lm_head" else "experts" if name in EXPERTS else "other weights"
    width, axes = FLOAT if name == "moe.router" else sizes.width, _gathered_axes(leaf)
    scattered = what == "experts" or mesh["pipe"] == 1
    whole = shard_bytes(leaf) // FLOAT * width
    for axis in axes:
        whole *= mesh[axis]
        sent = whole * (mesh[axis] - 1) / mesh[axis]
        yield Flow(f"{what}: gathered", "all-gather", (axis,), passes * sent)
        if scattered:
            yield Flow(f"{what}: gradients", "reduce-scatter", (axis,), filled * sent)
    if axes and not scattered:
        tokens = _token_axes(mesh)
        whole *= FLOAT // width if name == "lm_head" else 1  # logits are float32
        sent = 2 * whole * (1 - 1 / math.prod(mesh[axis] for axis in tokens))
        yield Flow(f"{what}: gradients", "all-reduce", tokens, filled * sent)


def _token_axes(mesh) -> tuple[str, ...]:
    return tuple(axis for axis in sharding.ACTIVE["B"] + sharding.ACTIVE["T"] if mesh[axis] > 1)


def _gathered_axes(leaf: jax.ShapeDtypeStruct) -> list[str]:
    """In the order in which they are gathered. Experts stay over their axis: it is the first letter's alone."""
    spec = sharding.spec_of(leaf)
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return [axis for axis in sharding.GATHERED if any(axis in entry and entry != ("expert",) for entry in entries)]


def _batch(run: RunConfig, mesh, sizes: Sizes, model: K3, rank: Rank) -> Iterable[Flow]:
    """Counts of the router, gradients of what is on every device, sums of the loss; the embedding."""
    config, moe, layers = run.model, run.model.moe, rank.passes
    counts = sum(map(config.is_moe, layers)) * moe.num_experts * (moe.quantile_bins + 1) if moe else 0
    vectors = 8 * len(layers) * config.hidden_size
    sent = 2 * sizes.micro * FLOAT * (counts + vectors)
    yield Flow("router's counts, gradients of vectors", "all-reduce", _token_axes(mesh), sent)
    if not rank.first:
        return
    # Tokens travel to the embedding's columns, columns back to the tokens' ranks (nn/embedding.py).
    axes = tuple(axis for axis in sharding.STORED["L"] if mesh[axis] > 1)
    ranks = math.prod(mesh[axis] for axis in axes)
    yield Flow("embedding: tokens", "all-gather", axes, sizes.micro * sizes.tokens * 4 * ranks)
    yield Flow("embedding: rows, and their gradients", "all-to-all", axes, 2 * sizes.micro * sizes.stream)
    axes = tuple(axis for axis in sharding.ACTIVE["B"] if axis not in axes)
    (table,), copies = jax.tree.leaves(model.embed), math.prod(mesh[axis] for axis in axes)
    sent = 2 * sizes.micro * shard_bytes(table) * (1 - 1 / copies)
    yield Flow("embedding: gradients", "all-reduce", tuple(axis for axis in axes if mesh[axis] > 1), sent)


def _muon(mesh, sizes: Sizes, model: K3) -> Iterable[Flow]:
    """Shards to the owners of whole blocks and back, for rows and columns; zeros fill up what the owners do not
    divide."""
    totals: Counter[tuple[str, ...]] = Counter()
    for name, leaf, _ in tensors(model):
        rule = rule_of(name)
        if not isinstance(rule, MuonRule):
            continue
        moves = list(_matrix_axes(rule, leaf, mesh))
        blocks, owners = _blocks(rule, leaf), math.prod(mesh[axis] for axes in moves for axis in axes)
        filled = -(-blocks // owners) * owners / blocks
        for axes in moves:
            others = 1 - 1 / math.prod(mesh[axis] for axis in axes)
            totals[axes] += 2 * others * filled * shard_bytes(leaf) // FLOAT * sizes.width
    for axes, total in totals.items():
        yield Flow("Muon: blocks to their owners and back", "all-to-all", axes, total)


def _matrix_axes(rule: MuonRule, leaf: jax.ShapeDtypeStruct, mesh) -> Iterator[tuple[str, ...]]:
    """Mesh axes of each axis of a block that is sharded."""
    names, spec = rule.axes.split(), sharding.spec_of(leaf)
    entries = [spec[i] if i < len(spec) else None for i in range(len(leaf.shape))][-len(names) :]
    for name, entry in zip(names, entries, strict=True):
        axes = (entry,) if isinstance(entry, str) else entry or ()
        axes = tuple(axis for axis in axes if mesh[axis] > 1)
        if axes and name in {*rule.rows.split(), *rule.columns.split()}:
            yield axes


def _blocks(rule: MuonRule, leaf: jax.ShapeDtypeStruct) -> int:
    """Blocks of which a device has a part."""
    axes, inside = rule.axes.split(), {*rule.rows.split(), *rule.columns.split()}
    shape = leaf.sharding.shard_shape(leaf.shape)
    stacked, own = shape[: -len(axes)], shape[-len(axes) :]
    return math.prod(stacked) * math.prod(size for axis, size in zip(axes, own, strict=True) if axis not in inside)


def _experts(mesh, sizes: Sizes, rank: Rank, kept: bool) -> Iterable[Flow]:
    """Rows there and back in each forward pass (the last is spared where their output is kept), then of z and the
    gradient; one borrowed expert per layer (docs/parallelism.md)."""
    moe, b = sizes.config.moe, sizes.width
    passes = [count for layer, count in rank.passes.items() if sizes.config.is_moe(layer)]
    trips = sum(2 * (count - kept) + 3 for count in passes)
    rows = sizes.tokens * moe.top_k * moe.latent_dim * b
    expert = 3 * moe.latent_dim * moe.expert_dim // sizes.tensor
    yield Flow("experts: rows", "ragged-all-to-all", ("expert",), sizes.micro * trips * rows)
    loans = expert * (sum(passes) * b + len(passes) * (b + FLOAT))
    yield Flow("experts: borrowed, and their gradients", "ragged-all-to-all", ("expert",), sizes.micro * loans)
    counts = FLOAT * moe.num_experts * mesh["expert"]
    yield Flow("experts: counts", "all-gather", ("expert",), sizes.micro * sum(passes) * counts)


def _tensor(mesh, sizes: Sizes, rank: Rank) -> Iterable[Flow]:
    """Mixers and channels end in a sum over inner widths, and so do the gradients of their inputs; of MoE the shared
    experts do and the routed ones, whose latents in float32 are as long as the stream in bfloat16."""
    axes, layers = ("tensor",), rank.passes
    ring = 2 * (1 - 1 / mesh["tensor"])
    sums = sum((count + 1) * (2 + sizes.config.is_moe(layer)) for layer, count in layers.items())
    yield Flow("sums over inner widths", "all-reduce", axes, ring * sizes.micro * sums * sizes.stream)
    yield Flow("largest logits", "all-gather", axes, FLOAT * len(layers) * (mesh["tensor"] - 1))


def _context(sizes: Sizes, rank: Rank) -> Iterable[Flow]:
    """Maps of the KDA state, inputs of the convolution, latents of MLA; next tokens."""
    config, ranks, axes = sizes.config, sizes.ranks, (sizes.rows_over,)
    kda = [count for layer, count in rank.passes.items() if not config.is_mla(layer)]
    mla = [count for layer, count in rank.passes.items() if config.is_mla(layer)]
    maps = 2 * config.kda.num_heads * config.kda.head_dim**2 * FLOAT // sizes.tensor
    sent = (sum(kda) + len(kda)) * maps * ranks.bit_length()
    yield Flow("KDA maps, convolution halos", "collective-permute", axes, sent)
    latents = sizes.tokens * ranks * config.mla.cache_dim * sizes.width
    yield Flow("MLA latents", "all-gather", axes, sum(mla) * latents)
    yield Flow("MLA latents: gradients", "reduce-scatter", axes, len(mla) * latents)


def _pipeline(mesh, sizes: Sizes, rank: Rank, model: K3) -> Iterable[Flow]:
    """In every tick rows to the next rank and cotangents, float32, to the one before, zeros where nothing is due; once
    a step the gradients of the embedding and the head, and what layers report."""
    schedule, axes = rank.stages.schedule, ("pipe",)
    onward, back = _rows(schedule, rank.number)
    float32 = sizes.stream // sizes.width * FLOAT
    yield Flow("AttnRes rows", "collective-permute", axes, schedule.ticks * onward * sizes.stream)
    yield Flow("AttnRes rows: cotangents", "collective-permute", axes, schedule.ticks * back * float32)
    ends = sum(shard_bytes(leaf) for _, leaf, place in tensors(model) if place is None)
    yield Flow("embedding, head: gradients of all ranks", "all-reduce", axes, 2 * ends * (1 - 1 / mesh["pipe"]))
    loads = len(rank.passes) * (sizes.config.moe.num_experts if sizes.config.moe else 0)
    yield Flow("reports of layers", "all-gather", axes, FLOAT * loads * (mesh["pipe"] - 1))


def _rows(schedule: Schedule, rank: int) -> tuple[int, int]:
    """(rows to the next rank, rows to the one before) in a tick."""
    links = [link for newest in range(schedule.message) for link in schedule.links(newest)]
    return sum(source == rank for source, _ in links), sum(target == rank for _, target in links)


# How XLA writes a reduce-scatter whose shards are not whole tiles: all of the sum, cut; rows from a neighbour.
INSTEAD_OF_SCATTER = ("all-reduce", "collective-permute")


def unlisted(found: Iterable[Collective], planned: Iterable[Flow]) -> list[Collective]:
    """Collectives of a compiled step whose kind and axes the plan does not list."""
    listed = {(flow.kind, flow.axes) for flow in planned}
    listed |= {(kind, axes) for scatter, axes in listed if scatter == "reduce-scatter" for kind in INSTEAD_OF_SCATTER}
    return [x for x in found if x.axes and (x.kind, x.axes) not in listed]
