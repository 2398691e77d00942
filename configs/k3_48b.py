"""K3 in everything but size: 47B parameters, 3.1B active, the scale of Kimi Linear 48B-A3B.

Command:    k3 train --config configs/k3_48b.py --workdir /mnt/BUCKET/k3_48b --set data.source=DIR
Hardware:   TPU v6e-256 (256 chips, 32 GB each)
Wall time:  about 3 days (predicted: 6 x 3.08e9 x 1.0e12 FLOP at 30 % of 256 x 918 TFLOP/s; never run on a TPU)
Expected:   a falling held-out loss; no figure is known for this model
Parameters: 47,054,015,776 total, 3,076,738,336 active per token

Width, heads and vocabulary as Kimi Linear's; the rest as K3: latent of half the width, 1 of 56 experts active, MLA in
every fourth layer and once more at the end, 8 AttnRes blocks. Parameters, gradients and Muon's momentum in float32 are
12 bytes a parameter: 565 GB, or 4.4 GB a chip. All sizes, the learning rate, the batch and the length of
the run are ours.
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
        vocab_size=163840,
        hidden_size=2304,
        num_layers=29,
        mla_layers=(3, 7, 11, 15, 19, 23, 27, 28),
        kda=KDAConfig(num_heads=32, head_dim=128),
        mla=MLAConfig(
            num_heads=32, q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        dense_dim=10752,
        moe=MoEConfig(num_experts=448, top_k=8, latent_dim=1152, expert_dim=1024, shared_dim=2048),
        attn_res_block=4,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )
    return RunConfig(
        name="k3_48b",
        model=model,
        mesh=MeshConfig(data=-1, fsdp=128),  # 128 divides the latent width
        # ours: 4.2M tokens a step, 1.0e12 in all
        data=DataConfig(source="data", tokenizer="tiktoken.model", sequence_length=8192, batch_size=512),
        optimizer=OptimizerConfig(learning_rate=6e-4, qk_clip=100.0),  # ours; the threshold is K2's
        train=TrainConfig(
            steps=240_000,
            grad_accumulation=2,
            checkpoint_every=1000,
            keep=4,
            eval_every=1000,
            eval_batches=16,
        ),
    )
