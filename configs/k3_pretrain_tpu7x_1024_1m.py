"""Context of 1,048,576 tokens: the last stage of Kimi K3's pre-training, on 1,024 TPU7x chips (2,048 cores).

Command:    k3 plan --config configs/k3_pretrain_tpu7x_1024_1m.py --topology tpu7x:8x8x16 --compile
Hardware:   1,024 TPU7x chips (2,048 cores); for `plan`, any CPU
Wall time:  `plan` 5 s, with --compile 12 min and 13 GB (measured on 2 cores). Training: never run
Expected:   77 of 101.7 GB on each core (compiled by libtpu 0.0.50.1; the ledger says 74), 16.8M tokens per step, no
            collective that the plan does not list
Parameters: 2,779,484,476,000 total, 104,189,612,640 active per token

A row of a million tokens lies on 64 pairs of cores in zig-zag order, 16,384 tokens on each, so that all have the same
causal pairs; a pair shares heads and inner widths, and 16 such rows are a step. Everything is stored over all axes. MLA
expands the keys and values of a row some heads at a time. Learning rate, batch, mesh and number of steps are ours: K3's
are not disclosed.
"""

from k3_jax.config import (
    Cosine,
    DataConfig,
    K3Config,
    KDAConfig,
    MeshConfig,
    MLAConfig,
    MoEConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


def get_config() -> RunConfig:
    return RunConfig(
        name="k3_pretrain_tpu7x_1024_1m",
        model=_model(),
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


def _model() -> K3Config:
    return K3Config(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        mla_layers=(*range(3, 92, 4), 92),
        kda=KDAConfig(num_heads=96, head_dim=128, conv_width=4, gate_lower_bound=-5.0),
        mla=MLAConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            latent_norm_eps=1e-6,
        ),
        dense_dim=33792,
        moe=MoEConfig(
            num_experts=896,
            top_k=16,
            latent_dim=3584,
            expert_dim=3072,
            shared_dim=6144,
            routed_scaling_factor=1.0,
            renormalize=True,
            quantile_bins=1000,  # in the report, App. D; those of the training are not disclosed
        ),
        first_dense_layers=1,
        attn_res_block=12,
        norm_eps=1e-5,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        init_std=0.02,
        max_positions=1048576,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )
