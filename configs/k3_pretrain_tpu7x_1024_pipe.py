"""Pre-training of Kimi K3 on 1,024 TPU7x chips (2,048 cores), with a pipeline of two ranks.

Command:    k3 plan --config configs/k3_pretrain_tpu7x_1024_pipe.py --topology tpu7x:8x8x16 --compile
Hardware:   1,024 TPU7x chips (2,048 cores); for `plan`, any CPU
Wall time:  `plan` 5 s, with --lower a minute of CPU time, with --compile 11 min and 8 GB (measured on 2 cores).
            Training: 32 to 60 s per step, 86 to 162 days (predicted from peaks, uncalibrated: all or nothing of what
            travels is hidden; never run)
Expected:   90 of 101.7 GB on each core (compiled by libtpu 0.0.50.1; the ledger says 83), 67M tokens per step, no
            collective that the plan does not list
Parameters: 2,779,484,476,000 total, 104,189,612,640 active per token

Each rank has four of the eight AttnRes blocks, on 1,024 cores: the model's width, 7,168, is not a multiple of 2,048, so
that many cores need an axis that cuts layers, rows or heads. A rank keeps one block's activations at a time, which
leaves room for rows of 16,384 tokens per core and for the experts' output. Batch, learning rate, mesh and number of
steps are ours: K3's are not disclosed. The options of XLA are those of LIBTPU_INIT_ARGS: a scheduler that hides
latencies, gathers and scatters by the SparseCores.
"""

from k3_jax.config import (
    Cosine,
    DataConfig,
    K3Config,
    KDAConfig,
    Keep,
    MeshConfig,
    MLAConfig,
    MoEConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


def get_config() -> RunConfig:
    return RunConfig(
        name="k3_pretrain_tpu7x_1024_pipe",
        model=_model(),
        mesh=MeshConfig(pipe=2, interleave=4, fsdp=16, expert=64),
        data=DataConfig(source="data", tokenizer="tiktoken.model", sequence_length=8192, batch_size=8192),
        optimizer=OptimizerConfig(
            learning_rate=2e-4,  # ours: K2's
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
            steps=230_968,  # ours: K2's 15.5T tokens
            grad_accumulation=4,
            activations=(Keep("moe_output"),),
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
