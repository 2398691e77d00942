"""A run that others have measured, planned with the formulas of our own plans: what the brackets are worth.

Kimi-K2 is no K3 (MLA in every layer, experts of the full width, plain residuals), so its operations and bytes are
counted here, from its published shape. Bandwidths, peaks and brackets are those of every plan.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from k3_jax.plan.bracket import UNCALIBRATED, Bracket, transfer_seconds, utilisation
from k3_jax.plan.flows import Flow
from k3_jax.plan.pod import Pod, pod
from k3_jax.plan.tables import new_table, size
from k3_jax.plan.work import Work, newton_schulz

Matrix = tuple[int, int]
Matrices = list[Matrix]
BFLOAT16 = 2
NS_STEPS = 5  # of Muon


@dataclass(frozen=True)
class Shape:
    """A model like DeepSeek-V3 (arXiv 2412.19437): MLA, then a dense SwiGLU or one shared and `top_k` of E experts."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_dense_layers: int
    dense_dim: int
    num_experts: int
    top_k: int
    expert_dim: int
    num_shared: int

    @property
    def moe_layers(self) -> int:
        return self.num_layers - self.first_dense_layers

    def mlp(self, width: int) -> Matrices:
        return [(self.hidden_size, width), (self.hidden_size, width), (width, self.hidden_size)]

    def attention(self) -> Matrices:
        D, H = self.hidden_size, self.num_heads
        query = [(D, self.q_lora_rank), (self.q_lora_rank, H * (self.qk_nope_head_dim + self.qk_rope_head_dim))]
        keys = [(D, self.kv_lora_rank + self.qk_rope_head_dim)]
        values = [(self.kv_lora_rank, H * (self.qk_nope_head_dim + self.v_head_dim))]
        return [*query, *keys, *values, (H * self.v_head_dim, D)]

    def of_all_tokens(self) -> Matrices:
        """Of all layers, those that every token multiplies with."""
        moe = [(self.hidden_size, self.num_experts), *self.num_shared * self.mlp(self.expert_dim)]
        layers = self.num_layers * self.attention() + self.first_dense_layers * self.mlp(self.dense_dim)
        return layers + self.moe_layers * moe

    @property
    def head(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def experts(self) -> int:
        """Numbers in the routed experts of all layers."""
        return self.moe_layers * self.num_experts * numbers(self.mlp(self.expert_dim))

    @property
    def parameters(self) -> int:
        return numbers(self.of_all_tokens()) + self.experts + 2 * self.head

    def forward(self, length: int) -> int:
        """Operations of one token in all layers, in a row of this length that is one document."""
        active = numbers(self.of_all_tokens()) + self.experts * self.top_k // self.num_experts
        per_key = self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return 2 * active + self.num_layers * per_key * (length + 1)


@dataclass(frozen=True)
class Measured:
    """A published set-up, and the MFU that was measured."""

    name: str
    source: str
    shape: Shape
    topology: str
    mesh: dict[str, int]
    rows_per_device: int
    sequence_length: int
    mfu: float

    @property
    def tokens_per_device(self) -> int:
        return self.rows_per_device * self.sequence_length


# Shape: the released configuration; the run: the pull request, and the command in tests/end_to_end/tpu/kimi/Run_Kimi.md
# there. "TPU7x-512" has 256 chips, 512 cores.
KIMI_K2 = Measured(
    name="kimi-k2",
    source="MaxText, pull request 3632",
    shape=Shape(
        num_layers=61,
        hidden_size=7168,
        vocab_size=163840,
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_dense_layers=1,
        dense_dim=18432,
        num_experts=384,
        top_k=8,
        expert_dim=2048,
        num_shared=1,
    ),
    topology="tpu7x:4x8x8",
    mesh={"fsdp": 64, "expert": 8},
    rows_per_device=16,
    sequence_length=1024,
    mfu=0.0643,
)


@dataclass(frozen=True)
class Plan:
    run: Measured
    pod: Pod
    work: Work
    flows: list[Flow]

    @property
    def bracket(self) -> Bracket:
        compute = self.work.executed / self.pod.devices / self.pod.chip.bf16_flops
        return Bracket(compute, transfer_seconds(self.flows, self.pod, self.run.mesh))

    @property
    def measured_seconds(self) -> float:
        """The step that the measured MFU means, with our count of the model's operations."""
        return utilisation(self.work, self.pod, 1.0) / self.run.mfu


def plan_published(run: Measured) -> Plan:
    place = pod(run.topology)
    tokens = run.tokens_per_device * place.devices
    return Plan(run, place, _work(run, tokens), list(_flows(run)))


def numbers(matrices: Matrices) -> int:
    return sum(map(math.prod, matrices))


def _work(run: Measured, tokens: int) -> Work:
    """Layers run forward twice (everything in them is recomputed), the head once."""
    shape, (fsdp, ranks) = run.shape, run.mesh.values()
    layers, head = shape.forward(run.sequence_length), 2 * shape.head
    experts = shape.moe_layers * shape.num_experts
    muon = sum(muon_operations(matrix, fsdp * ranks) for matrix in shape.of_all_tokens())
    muon += experts * sum(muon_operations(matrix, fsdp) for matrix in shape.mlp(shape.expert_dim))
    model = 3 * (layers + head) * tokens
    return Work(tokens, model, model + layers * tokens + muon, muon)


def muon_operations(matrix: Matrix, parts: int) -> int:
    """Of one matrix on all devices that have a part of it, as XLA shards Optax's Muon, which says nothing of it: sums
    of the product with its transpose are added up, and every device squares them."""
    return NS_STEPS * (newton_schulz(matrix) + (parts - 1) * 2 * min(matrix) ** 3)


def muon_bytes(matrix: Matrix, parts: int) -> float:
    """What each of these devices sends for it: the sums, once in each step of the iteration."""
    return NS_STEPS * 2 * (1 - 1 / parts) * BFLOAT16 * min(matrix) ** 2


def _flows(run: Measured) -> Iterator[Flow]:
    """Weights gathered for the forward pass and again for the backward pass, gradients scattered; tokens of a layer
    gathered by all ranks of `expert`, what these found added up and scattered; Muon."""
    shape, (fsdp, ranks) = run.shape, run.mesh.values()
    everywhere = BFLOAT16 * (numbers(shape.of_all_tokens()) + 2 * shape.head) * (1 - 1 / (fsdp * ranks))
    experts = BFLOAT16 * shape.experts / ranks * (1 - 1 / fsdp)
    tokens = BFLOAT16 * shape.moe_layers * run.tokens_per_device * shape.hidden_size * (ranks - 1)
    both = ("fsdp", "expert")
    yield Flow("other weights: gathered", "all-gather", both, 2 * everywhere)
    yield Flow("other weights: gradients", "reduce-scatter", both, everywhere)
    yield Flow("experts: gathered", "all-gather", ("fsdp",), 2 * experts)
    yield Flow("experts: gradients", "reduce-scatter", ("fsdp",), experts)
    # Forward, recomputed, and gradients of what came back; what came back, and gradients of the tokens.
    yield Flow("experts: tokens", "all-gather", ("expert",), 3 * tokens)
    yield Flow("experts: sums", "reduce-scatter", ("expert",), 2 * tokens)
    muon = sum(muon_bytes(matrix, fsdp * ranks) for matrix in shape.of_all_tokens())
    yield Flow("Muon: other weights", "all-reduce", both, muon)
    muon = sum(muon_bytes(matrix, fsdp) for matrix in shape.mlp(shape.expert_dim))
    yield Flow("Muon: experts", "all-reduce", ("fsdp",), shape.moe_layers * shape.num_experts // ranks * muon)


def as_json(plan: Plan) -> dict[str, Any]:
    seconds = plan.bracket.seconds()
    return {
        "published": plan.run.name,
        "source": plan.run.source,
        "calibration": UNCALIBRATED,
        "topology": plan.pod.topology,
        "parameters": plan.run.shape.parameters,
        "work": dataclasses.asdict(plan.work),
        "collectives": [dataclasses.asdict(flow) for flow in plan.flows],
        "seconds": seconds | {"measured": plan.measured_seconds},
        "utilisation": {name: utilisation(plan.work, plan.pod, x) for name, x in seconds.items()}
        | {"measured": plan.run.mfu},
    }


def tables(plan: Plan) -> list[Table]:
    run, work, place = plan.run, plan.work, plan.pod
    axes = ", ".join(f"{name} {count}" for name, count in run.mesh.items())
    what = f"{run.name} on {place.chips} {place.chip.name} chips ({axes}): what a device sends in a step"
    sent = new_table(what, "collective", "axes", "what", "bytes", "seconds", text_columns=3)
    for flow in sorted(plan.flows, key=lambda flow: -flow.bytes):
        seconds = f"{flow.seconds(place.chip, run.mesh):.3f}"
        sent.add_row(flow.kind, " ".join(flow.axes), flow.what, size(round(flow.bytes)), seconds)
    time = new_table(f"time of a step of {work.tokens:,} tokens ({UNCALIBRATED})", "quantity", "value")
    time.add_row("parameters", f"{run.shape.parameters:,}")
    time.add_row("operations of the model, analytic", f"{work.model:.4g}")
    time.add_row("executed: recomputation and Muon too", f"{work.executed:.4g}")
    time.add_row("at the peak of the matrix units", f"{plan.bracket.compute:.2f} s")
    time.add_row("transfers", f"{plan.bracket.transfer:.2f} s")
    for name, seconds in plan.bracket.seconds().items():
        mfu = f"MFU {100 * utilisation(work, place, seconds):.1f} %"
        longer = f"the measured one takes {plan.measured_seconds / seconds:.1f} times as long"
        time.add_row(f"step, {name}", f"{seconds:.2f} s, {mfu}; {longer}")
    time.add_row(f"step, measured ({run.source})", f"{plan.measured_seconds:.2f} s, MFU {100 * run.mfu:.2f} %")
    return [sent, time]


RUNS = {run.name: run for run in (KIMI_K2,)}
