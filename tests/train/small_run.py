"""A run of six steps on a model of three layers."""

import json
from pathlib import Path

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


def small_run(tmp_path: Path) -> RunConfig:
    """The text lies beside the working directories."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(40):
        (texts / f"{i}.txt").write_text(f"document {i}: " + "the quick brown fox jumps over the lazy dog. " * 6)
    model = K3Config(
        vocab_size=256,
        hidden_size=16,
        num_layers=3,
        mla_layers=(2,),
        kda=KDAConfig(2, 8),
        mla=MLAConfig(2, 8, 8, 8, 4, 8),
        dense_dim=32,
        moe=MoEConfig(4, 2, 8, 8, 16, quantile_bins=32),
        attn_res_block=2,
    )
    return RunConfig(
        name="test",
        model=model,
        data=DataConfig(sequence_length=32, batch_size=8, source=str(texts)),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        train=TrainConfig(
            steps=6,
            checkpoint_every=2,
            log_every=1,
            eval_every=100,
            eval_batches=2,
            compute_dtype="float32",
            loss_chunk=32,
            grad_accumulation=2,
        ),
        mesh=MeshConfig(data=2, fsdp=2, tensor=2),
    )


def losses(workdir: Path, name: str = "loss") -> dict[int, float]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}
