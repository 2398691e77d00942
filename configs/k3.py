"""Kimi K3 as released: 2.78T parameters, 104.2B active.

Command:    k3 plan --config configs/k3.py
Hardware:   for `plan`, any CPU; to train, 4096 TPU7x cores (2048 chips) with the mesh axes `expert` and `context`
Wall time:  `plan`: 5 s (measured on 2 cores). Training: at least 60 days (predicted: 6 x 1.04e11 x 1.55e13 FLOP at
            40 % of 4096 x 1.15 PFLOP/s; never run)
Expected:   the parameter count of the released checkpoint, 24 MLA layers that cache 576 values a token each
Parameters: 2,779,484,476,000 total, 104,189,612,640 active per token

The architecture is that of the released config.json. Of the training the report discloses the optimizer (Per-Head Muon,
weight decay 0.1, 1 % warm-up, cosine to a fixed minimum, K2's weight clipping) and the context lengths; what is marked
"ours" below is not K3's: its authors disclosed no batch, learning rate, number of tokens or mesh.
"""

from k3_jax.config import (
    ContextStage,
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
        name="k3",
        model=_model(),
        mesh=MeshConfig(data=-1, fsdp=512),  # ours: 512 divides every sharded width; with the expert axis 64 x 64
        data=DataConfig(
            source="data",
            tokenizer="tiktoken.model",
            sequence_length=8192,
            batch_size=8192,  # ours: K2's 67M tokens
        ),
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
            checkpoint_every=500,  # ours, as is all that follows but the lengths of the stages
            keep=4,
            eval_every=1000,
            context_stages=(
                ContextStage(start=0.80, sequence_length=65_536),
                ContextStage(start=0.95, sequence_length=262_144),
                ContextStage(start=0.98, sequence_length=1_048_576),
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
