"""A K3 in everything but size, trained on the Python files of the standard library, byte by byte.

Command:    k3 train --config configs/tiny.py --workdir runs/tiny
Hardware:   any CPU; meant for 2 cores
Wall time:  under 10 minutes on 2 cores, installing and compiling included (measured, tests running beside it)
Expected:   held-out loss 1.40 nats per byte (measured); n-gram models of the same bytes: trigram 1.89, 4-gram 1.54
Parameters: 2,739,236 total, 1,821,732 active per token

KDA and MLA layers with MLA last, Block AttnRes, a dense first layer, then Stable LatentMoE with Quantile Balancing. All
sizes are ours; so are learning rate, batch and length of the run, which K3's authors did not disclose for K3 either.
"""

from k3_jax.config import DataConfig, K3Config, KDAConfig, MLAConfig, MoEConfig, OptimizerConfig, RunConfig, TrainConfig


def get_config() -> RunConfig:
    model = K3Config(
        vocab_size=256,
        hidden_size=128,
        num_layers=7,  # ours; two periods of KDA, KDA, MLA after the first layer: fewer bodies to compile than 3:1
        mla_layers=(3, 6),
        kda=KDAConfig(num_heads=4, head_dim=32),
        mla=MLAConfig(
            num_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
        ),
        dense_dim=512,
        moe=MoEConfig(num_experts=8, top_k=2, latent_dim=64, expert_dim=128, shared_dim=256, quantile_bins=256),
        attn_res_block=3,
        eos_token_id=3,  # ETX, which ends a turn in chat data and does not occur in text
    )
    return RunConfig(
        name="tiny",
        model=model,
        data=DataConfig(source="stdlib", sequence_length=256, batch_size=16),  # ours
        optimizer=OptimizerConfig(learning_rate=3e-3),  # ours; weight decay, cosine and warm-up are K3's
        train=TrainConfig(
            steps=260,  # ours
            compute_dtype="float32",
            loss_chunk=256,
            eval_every=65,
            checkpoint_every=65,
        ),
    )
