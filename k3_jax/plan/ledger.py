"""Bytes on each device during a training step, from the configuration and the sharding table: nothing is compiled.

Arguments (weights, optimizer state, the batch) are exact but for the padding of tiles. Temporaries are those of the
fullest moments of a step, listed from the compiler's live ranges of K3's step; `k3 plan --compile` compares both.
S tokens on a device, b bytes of the compute type, N = S k rows of experts, m experts at home, D, L, F, H K as in nn/.

On a pipeline all ranks run one program: each has room for all slots of the pattern, and for the fullest rank's rows.
"""

from collections import Counter
from dataclasses import dataclass

from k3_jax import audit
from k3_jax.config import Keep, Offload, Quantize, RunConfig
from k3_jax.nn.activations import BLOCK
from k3_jax.nn.mla import head_groups
from k3_jax.nn.transformer import K3
from k3_jax.parallel.transport import CHUNKS
from k3_jax.plan.pod import Pod
from k3_jax.plan.sizes import FLOAT, Sizes, shard_bytes
from k3_jax.plan.stages import Stages, tensors
from k3_jax.train.optimizer import AdamWRule, MuonRule, rule_of

PACKING = 0.05  # of the temporaries: what the compiler's placement leaves empty, as observed

WEIGHTS, OPTIMIZER, BATCH = "weights", "optimizer", "batch"
GRADIENTS, ACTIVATIONS, BUFFERS, EMPTY = "gradients", "activations", "communication", "left empty"
# The first thing to change where an item is the largest.
KNOBS = {
    WEIGHTS: "more chips, in mesh.expert or mesh.fsdp",
    OPTIMIZER: "more chips, in mesh.expert or mesh.fsdp",
    BATCH: "train.grad_accumulation",
    GRADIENTS: "more chips; train.grad_accumulation = 1 keeps them once, a larger mesh.interleave a smaller chunk's",
    ACTIVATIONS: "fewer tokens per device: data.batch_size, train.grad_accumulation or mesh.context",
    BUFFERS: "fewer tokens per device, or a larger mesh.expert: fewer experts at home",
    EMPTY: "nothing",
}


@dataclass(frozen=True)
class Item:
    group: str
    name: str
    bytes: int


@dataclass(frozen=True)
class Ledger:
    """`arguments` are there all the time, `moments` are the temporaries of the fullest moments of a step."""

    arguments: list[Item]
    moments: dict[str, list[Item]]

    @property
    def argument_bytes(self) -> int:
        return sum(item.bytes for item in self.arguments)

    @property
    def moment(self) -> str:
        """The fullest one."""
        return max(self.moments, key=lambda name: sum(item.bytes for item in self.moments[name]))

    @property
    def temporary_bytes(self) -> int:
        return sum(item.bytes for item in self.moments[self.moment])

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.temporary_bytes

    @property
    def largest(self) -> list[Item]:
        """What is there at the peak, the largest first."""
        return sorted(self.arguments + self.moments[self.moment], key=lambda item: -item.bytes)

    def by_group(self) -> dict[str, int]:
        found = Counter()
        for item in self.largest:
            found[item.group] += item.bytes
        return dict(found)


def make_ledger(run: RunConfig, pod: Pod, model: K3) -> Ledger:
    """`model` is abstract, made under the pod's mesh."""
    sizes, stages = Sizes.of(run, pod), Stages.of(run)
    weights, moments = Counter(), Counter()
    for name, leaf, _ in tensors(model):
        part, size = audit.part_of(name), shard_bytes(leaf)
        weights[part] += size
        moments[part] += size * _moments_of(name)
    batch = sizes.micro * sizes.tokens * (4 + 4 + 1)
    twice = sizes.micro > 1 and not stages.schedule  # of all micro-batches, and of this one
    gradients = [Item(GRADIENTS, f"of {part}", size * (2 if twice else 1)) for part, size in weights.items()]
    saved = _saved(sizes, run.train.activations) + (_pipeline(sizes, stages, model) if stages.schedule else [])
    arguments = [Item(WEIGHTS, part, size) for part, size in weights.items()]
    arguments += [Item(OPTIMIZER, f"of {part}", size) for part, size in moments.items()]
    return Ledger(
        [*arguments, Item(BATCH, "tokens, segments, mask", batch)],
        {
            "backward pass of a KDA layer": _padded(gradients + saved + _layer(sizes)),
            "backward pass of an MLA layer": _padded(gradients + saved + _whole_row(sizes)),
            "update": _padded(_update(weights, sizes)),
        },
    )


def _moments_of(name: str) -> int:
    """How many arrays of the parameter's shape the optimizer keeps."""
    match rule_of(name):
        case MuonRule():
            return 1
        case AdamWRule():
            return 2
    return 0


def _padded(items: list[Item]) -> list[Item]:
    return [*items, Item(EMPTY, "between the others", round(PACKING * sum(item.bytes for item in items)))]


def _pipeline(sizes: Sizes, stages: Stages, model: K3) -> list[Item]:
    """What a rank of a pipeline carries from tick to tick, and the chunk at work: where a rank has several, its weights
    are cut out of theirs; so are those of a period where the scan has several, and its gradients put back."""
    schedule, interleave = stages.schedule, stages.depth.interleave
    float32 = sizes.stream // sizes.width * FLOAT
    ends, chunk, period = 0, 0, 0
    for _, leaf, place in tensors(model):
        if place is None:
            ends += shard_bytes(leaf)
        else:
            repeat = stages.depth.groups[place[0]].repeat
            chunk += shard_bytes(leaf) // interleave
            period += shard_bytes(leaf) // interleave // repeat if repeat > 1 else 0
    pool, returns, message = schedule.pool + 1, schedule.returns + 1, schedule.message
    return [
        Item(ACTIVATIONS, f"AttnRes rows in flight, {pool}", pool * sizes.stream),
        Item(ACTIVATIONS, f"cotangents of such rows, {returns}, float32", returns * float32),
        Item(ACTIVATIONS, "AttnRes banks before a pass and in a layer", 2 * schedule.num_rows * sizes.stream),
        Item(BUFFERS, f"messages of {message} rows from both neighbours", message * (sizes.stream + float32)),
        Item(GRADIENTS, "of embedding and head in a tick", ends),
        Item(GRADIENTS, "of the chunk at work, and of a period of it", chunk + period),
        Item(WEIGHTS, "of the chunk at work, and of a period of it", (chunk if interleave > 1 else 0) + period),
    ]


def _saved(sizes: Sizes, policy: tuple[Keep, ...]) -> list[Item]:
    """What the forward pass leaves for the backward pass: the inputs of all layers, and what the policy keeps too."""
    rows = sizes.config.num_attn_res_blocks
    keeps = {"layer_input": Keep("layer_input")} | {keep.name: keep for keep in policy}
    return [
        *(_kept(sizes, keep) for keep in keeps.values()),
        Item(ACTIVATIONS, f"AttnRes bank, {rows} rows", rows * sizes.stream),
        Item(ACTIVATIONS, "its gradient, float32", rows * sizes.stream // sizes.width * FLOAT),
    ]


def _kept(sizes: Sizes, keep: Keep) -> Item:
    """A named tensor of all layers that have it; one in the host's memory takes none here."""
    config, tensor = sizes.config, sizes.tensor
    mla, heads = config.mla, config.kda.num_heads * config.kda.head_dim // tensor
    layers, mlas = sizes.slots.total(), sum(count for kind, count in sizes.slots.items() if kind.mla)
    moes = sum(count for kind, count in sizes.slots.items() if kind.moe)
    kdas, dense = layers - mlas, layers - moes
    latent, shared = (config.moe.latent_dim, config.moe.shared_dim) if config.moe else (0, 0)
    count, numbers = {
        "layer_input": (layers, layers * config.hidden_size),
        "kda_qkv": (kdas, kdas * 3 * heads),
        "kda_output": (kdas, kdas * heads),
        "mla_latent": (mlas, mlas * mla.cache_dim),
        "mla_query": (mlas, mlas * mla.q_lora_rank),
        "mla_output": (mlas, mlas * mla.num_heads * mla.v_head_dim // tensor),
        "moe_latent": (moes, moes * latent),
        "moe_output": (moes, moes * latent),
        "ffn_hidden": (layers, (moes * shared + dense * config.dense_dim) // tensor),
    }[keep.name]
    forms = {type(step) for step in keep.through}
    width = 0 if Offload in forms else 1 + FLOAT / BLOCK if Quantize in forms else sizes.width
    how = "on the host" if Offload in forms else "FP8" if Quantize in forms else "kept"
    return Item(ACTIVATIONS, f"{keep.name} of {count} layers, {how}", round(sizes.tokens * numbers * width))


def _layer(sizes: Sizes) -> list[Item]:
    """Of a KDA layer while the chunks of its experts travel: the fullest moment of its backward pass."""
    config, S, b = sizes.config, sizes.tokens, sizes.width
    heads = S * config.kda.num_heads * config.kda.head_dim // sizes.tensor
    weights = 5 * config.hidden_size * config.kda.num_heads * config.kda.head_dim // sizes.tensor
    items = [
        Item(ACTIVATIONS, "KDA: 4 [S, H K] in float32, 14 for its backward pass", heads * (4 * FLOAT + 14 * b)),
        Item(ACTIVATIONS, "12 [S, D] around it", 12 * sizes.stream),
        Item(BUFFERS, "gathered weights of KDA", weights * b),
    ]
    return items + (_experts(sizes) if config.moe else [])


def _whole_row(sizes: Sizes) -> list[Item]:
    """Where a row is cut over ranks, each expands the keys and values of all of it, some heads at a time (nn/mla.py);
    three float32 arrays are as wide as a latent: it, its gradient so far and that of the heads at work."""
    mla, heads = sizes.config.mla, sizes.config.mla.num_heads // sizes.tensor
    per_head = sizes.tokens * sizes.ranks * (mla.qk_nope_head_dim + mla.v_head_dim) * sizes.width
    row = per_head * heads // head_groups(heads, per_head) if sizes.ranks > 1 else 0
    latents = sizes.tokens * sizes.ranks * mla.cache_dim * FLOAT if sizes.ranks > 1 else 0
    return [
        Item(ACTIVATIONS, "12 [S, D] around it", 12 * sizes.stream),
        Item(BUFFERS, "MLA: keys and values of whole rows, and their gradients", 2 * row),
        Item(BUFFERS, "MLA: latents of whole rows, and their gradients", 3 * latents),
    ]


def _experts(sizes: Sizes) -> list[Item]:
    """Rows of z and of the upstream gradient, sent and received; three of four chunks' gate, up and hidden."""
    moe, b = sizes.config.moe, sizes.width
    N, L, F = sizes.tokens * moe.top_k, moe.latent_dim, moe.expert_dim // sizes.tensor
    m = moe.num_experts // sizes.expert
    kept = (CHUNKS - 1) / CHUNKS
    return [
        Item(BUFFERS, "experts: own and borrowed w1, w3, w2", 3 * 2 * m * L * F * b),
        Item(BUFFERS, "experts: rows sent and received, of z and the gradient", round(N * L * b * (2 + 2 + 1))),
        Item(ACTIVATIONS, "experts: rows kept for the weights' gradients", round(N * b * kept * (2 * L + 3 * F))),
        Item(ACTIVATIONS, "experts: sums of a chunk, float32", N // CHUNKS * L * FLOAT),
    ]


def _update(weights: Counter, sizes: Sizes) -> list[Item]:
    """New momentum in the place of the gradients, updates, what Muon sends: all sharded like the weights."""
    total = sum(weights.values())
    return [
        Item(OPTIMIZER, "new momentum, not yet accepted", total),
        Item(OPTIMIZER, "updates, float32", total),
        Item(BUFFERS, "Muon: blocks at their owners", total // FLOAT * sizes.width),
    ]
