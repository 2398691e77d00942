"""Operations of a training step, counted from the configuration: the compiler's own count takes loop bodies once.

"Model" operations are what the mathematics of forward and backward needs, the numerator of an MFU. "Executed" ones add
what is computed twice (the backward pass of a layer recomputes it, the loss its logits) and Muon.
"""

from dataclasses import dataclass

from k3_jax import audit
from k3_jax.config import RunConfig
from k3_jax.plan.stages import Stages
from k3_jax.train.optimizer import OptimizerRow

CHUNK = 64  # of KDA, in tokens


@dataclass(frozen=True)
class Work:
    """Multiplications and additions of one step, all devices together."""

    tokens: int
    model: int
    executed: int
    muon: int


def step_work(run: RunConfig, shapes: audit.Shapes, rows: list[OptimizerRow]) -> Work:
    tokens = run.data.batch_size * run.data.sequence_length
    layers, head = forward(run, shapes)
    muon = sum(orthogonalisation(row, run.optimizer.ns_steps) for row in rows)
    model = 3 * (layers + head) * tokens
    # Each layer runs forward twice, on a pipeline a third time, gate and up of the experts once more
    # (parallel/expert.py), the head twice; not so the three products of experts whose output is kept.
    kept = any(keep.name == "moe_output" for keep in run.train.activations)
    again = layers * (Stages.of(run).mean_forward_passes - 1) + head
    again += gate_and_up(run) - kept * 3 * gate_and_up(run) // 2
    return Work(tokens, model, model + round(again * tokens) + muon, muon)


def forward(run: RunConfig, shapes: audit.Shapes) -> tuple[int, int]:
    """Operations of one token's forward pass: all layers, and the head."""
    config = run.model
    head = 2 * config.hidden_size * config.vocab_size
    products = 2 * audit.count_parameters(config, shapes)["active"] - head
    mla, kda = len(config.mla_layers), config.num_layers - len(config.mla_layers)
    seen = (run.data.sequence_length + 1) / 2  # keys of an average query, if a row is one document
    attention = 2 * config.mla.num_heads * (config.mla.qk_head_dim + config.mla.v_head_dim) * seen
    H, K = config.kda.num_heads, config.kda.head_dim
    delta_rule = H * (6 * K * K + 8 * CHUNK * K + CHUNK**2)
    return round(products + mla * attention + kda * delta_rule), head


def gate_and_up(run: RunConfig) -> int:
    """Of the routed experts, per token."""
    moe = run.model.moe
    layers = run.model.num_layers - run.model.first_dense_layers
    return 2 * 2 * layers * moe.top_k * moe.latent_dim * moe.expert_dim if moe else 0


def orthogonalisation(row: OptimizerRow, steps: int) -> int:
    """Of all blocks of `count` parameters: per step 2 a b min(a, b) twice and 2 min(a, b)^3."""
    per_piece = row.blocks // len(row.block_shapes) if row.block_shapes else 0
    return sum(row.count * per_piece * steps * newton_schulz(shape) for shape in row.block_shapes)


def newton_schulz(shape: tuple[int, int]) -> int:
    short, long = sorted(shape)
    return 4 * long * short**2 + 2 * short**3
