"""Context of 1,048,576 tokens: the last stage of Kimi K3's pre-training, on 1,024 TPU7x chips (2,048 cores).

Command:    k3 plan --config configs/k3_pretrain_tpu7x_1024_1m.py --topology tpu7x:8x8x16 --lower
Hardware:   1,024 TPU7x chips (2,048 cores); for `plan`, any CPU
Wall time:  `plan` 5 s (measured on 2 cores). Training: never run
Expected:   the ledger says 77 of 101.7 GB on each core, 16.8M tokens per step
Parameters: 2,779,484,476,000 total, 104,189,612,640 active per token

A row of a million tokens lies on 64 pairs of cores in zig-zag order, 16,384 tokens on each, so that all have the same
causal pairs; a pair shares heads and inner widths, and 16 such rows are a step. Everything is stored over all axes. MLA
expands the keys and values of a row some heads at a time. Learning rate, batch, mesh and number of steps are ours: K3's
are not disclosed.
"""

from k3_jax.config import Cosine, DataConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig
from k3_jax.recipe import load_recipe


def get_config() -> RunConfig:
    return RunConfig(
        name="k3_pretrain_tpu7x_1024_1m",
        model=load_recipe("configs/k3.py").model,
        mesh=MeshConfig(expert=16, zigzag=64, tensor=2),
        data=DataConfig(source="data", tokenizer="tiktoken.model", sequence_length=1_048_576, batch_size=16),
        optimizer=OptimizerConfig(
            learning_rate=2e-5,  # ours: where K2's decay ends
            schedule=Cosine(min_ratio=0.1),  # the minimum is ours
            warmup_fraction=0.01,
            weight_decay=0.1,
            momentum=0.95,  # ours: K2's, as are the next two
            ns_steps=5,
            update_rms=0.2,
            grad_clip=1.0,  # ours
            qk_clip=100.0,  # K3 keeps the clipping; this threshold is K2's
        ),
        train=TrainConfig(
            steps=10_000,  # ours
            loss_chunk=2048,
            checkpoint_every=500,
            keep=4,
            eval_every=1000,
            tpu_options=(
                "xla_tpu_enable_latency_hiding_scheduler=true",
                "xla_tpu_enable_sparse_core_collective_offload_all_gather=true",
                "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true",
            ),
        ),
    )
