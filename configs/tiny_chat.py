"""Chat SFT of the tiny model: the same training with a loss mask, started from a checkpoint.

Command:    k3 train --config configs/tiny_chat.py --init runs/tiny --workdir runs/chat --set data.source=chat.jsonl
Hardware:   any CPU; meant for 2 cores
Wall time:  about 3 minutes on 2 cores, compiling included (predicted)
Expected:   the loss, over the assistant's bytes only, falls from the first step; a reply ends with byte 3
Parameters: 2,739,236 total, 1,821,732 active per token

A line of the file is one conversation, {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}]};
a model of this size learns the form of a reply, not its sense. The model must be that of the checkpoint, here that of
configs/tiny.py; the optimizer starts afresh. All values are ours.
"""

from k3_jax.config import DataConfig, K3Config, KDAConfig, MLAConfig, MoEConfig, OptimizerConfig, RunConfig, TrainConfig


def get_config() -> RunConfig:
    model = K3Config(
        vocab_size=256,
        hidden_size=128,
        num_layers=7,
        mla_layers=(3, 6),
        kda=KDAConfig(num_heads=4, head_dim=32),
        mla=MLAConfig(
            num_heads=4, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
        ),
        dense_dim=512,
        moe=MoEConfig(num_experts=8, top_k=2, latent_dim=64, expert_dim=128, shared_dim=256, quantile_bins=256),
        attn_res_block=3,
        eos_token_id=3,  # ETX ends a turn
    )
    return RunConfig(
        name="tiny_chat",
        model=model,
        data=DataConfig(source="chat.jsonl", chat=True, sequence_length=256, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        train=TrainConfig(
            steps=200,
            compute_dtype="float32",
            loss_chunk=256,
            eval_every=50,
            checkpoint_every=50,
        ),
    )
