"""K3 in everything but size: 3B parameters, 0.5B active, for one TPU v6e-8 host.

Command:    k3 train --config configs/k3_3b.py --workdir runs/k3_3b --set data.source=DIR --set data.tokenizer=FILE
Hardware:   one TPU v6e-8 host (8 chips, 32 GB each)
Wall time:  about 24 h (predicted: 6 x 0.50e9 x 6.3e10 FLOP at 30 % of 8 x 918 TFLOP/s; never run on a TPU)
Expected:   a falling held-out loss; no figure is known for this size
Parameters: 3,047,343,424 total, 501,400,896 active per token

K3's proportions: latent of half the width, experts of 0.44 widths, a shared expert of two, MLA in every fourth layer
and once more at the end. Parameters, gradients and Muon's momentum in float32 are 12 bytes a parameter: 37 GB, or
4.6 GB a chip. All sizes, the learning rate, the batch and the length of the run are ours.
"""

from k3_jax.config import (
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
    model = K3Config(
        vocab_size=163840,  # K3's tokenizer
        hidden_size=1024,
        num_layers=17,
        mla_layers=(3, 7, 11, 15, 16),
        kda=KDAConfig(num_heads=16, head_dim=128),
        mla=MLAConfig(
            num_heads=16, q_lora_rank=384, kv_lora_rank=256, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        dense_dim=4608,
        moe=MoEConfig(num_experts=224, top_k=8, latent_dim=512, expert_dim=448, shared_dim=896),
        attn_res_block=2,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )
    return RunConfig(
        name="k3_3b",
        model=model,
        mesh=MeshConfig(fsdp=-1),
        # ours: 1.05M tokens a step, 6.3e10 in all
        data=DataConfig(source="data", tokenizer="tiktoken.model", sequence_length=4096, batch_size=256),
        optimizer=OptimizerConfig(learning_rate=1e-3, qk_clip=100.0),  # ours; the threshold is K2's
        train=TrainConfig(
            steps=60_000,
            grad_accumulation=8,
            checkpoint_every=1000,
            eval_every=1000,
            eval_batches=16,
            loss_chunk=512,
        ),
    )
