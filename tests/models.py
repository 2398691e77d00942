"""Models for tests, and the jitted functions that several test files share.

Weights are drawn with NumPy: compiling the random initialisers of a model takes tens of seconds on a CPU.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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
from k3_jax.nn import depth, layout, transformer
from k3_jax.nn.grouping import Depth
from k3_jax.nn.transformer import K3
from k3_jax.weights.released import load_released, read_config

ROOT = Path(__file__).resolve().parents[1]
TINY = K3Config(
    vocab_size=48,
    hidden_size=32,
    num_layers=4,
    mla_layers=(2,),
    kda=KDAConfig(num_heads=2, head_dim=8),
    mla=MLAConfig(2, q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    dense_dim=40,
    moe=MoEConfig(num_experts=6, top_k=2, latent_dim=16, expert_dim=12, shared_dim=20, quantile_bins=50),
    attn_res_block=3,
)
PARTS = ("kda", "mla", "moe")
# Without LLVM's optimisations compiling, which is most of these tests' time, takes 40 % less.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def tiny_config(**changes: Any) -> K3Config:
    """Four layers of every kind. Changes are K3Config's fields; `kda`, `mla` and `moe` may be dicts of changes."""
    for part in PARTS:
        if isinstance(changes.get(part), dict):
            changes[part] = dataclasses.replace(getattr(TINY, part), **changes[part])
    return dataclasses.replace(TINY, **changes)


def abstract_model(config: K3Config, dtype=jnp.float32) -> K3:
    return jax.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0), dtype=dtype))


def draw(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """One tensor by its canonical name: activations stay near 1, no vector is at its initial 0 or 1."""
    x = rng.normal(size=shape)
    kind = name.rsplit(".", 1)[-1]
    if "norm" in kind:
        return 1 + 0.1 * x
    if len(shape) < 2 or kind in ("dt_bias", "A_log"):
        return 0.3 * x
    if kind == "embed":
        return x
    fan_in = {"o": np.prod(shape[:2]), "w1": shape[1], "w3": shape[1], "w2": shape[1]}.get(kind, shape[0])
    return x * float(fan_in) ** -0.5


def make_model(config: K3Config, seed: int = 0, dtype=jnp.float32) -> K3:
    """A model with weights from NumPy; tensors that are always float32 stay so."""
    rng = np.random.default_rng(seed)
    like = abstract_model(config, dtype)
    abstract = layout.abstract_layers(like, like.depth)
    named = {name: draw(name, x.shape, rng).astype(x.dtype) for name, x in sorted(abstract.items())}
    return from_named(named, config, dtype)


def from_named(named: dict[str, np.ndarray], config: K3Config, dtype=jnp.float32) -> K3:
    """A model from canonical names and arrays."""
    like = abstract_model(config, dtype)
    return jax.jit(lambda named: layout.from_layers(named, like, like.depth))(named)


def to_named(model: Any, config: K3Config) -> dict[str, np.ndarray]:
    """Canonical names and float64 arrays of a model or of anything shaped like it."""
    named = jax.jit(lambda tree: layout.to_layers(tree, Depth(config)))(model)
    return {name: np.asarray(x).astype(np.float64) for name, x in named.items()}


def load_golden(folder: str | Path) -> tuple[K3, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(model in float32, its tensors by canonical name, expected.npz) of a golden checkpoint; a bare name is one of
    tests/golden."""
    folder = ROOT / "tests" / "golden" / folder
    config = read_config(folder)
    named = {name: np.asarray(x, np.float32) for name, x in load_released(folder, config)}
    return from_named(named, config), named, dict(np.load(folder / "expected.npz"))


def random_tokens(config: K3Config, batch: int, length: int, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng(seed + 1000)
    return jnp.asarray(rng.integers(0, config.vocab_size, (batch, length)), jnp.int32)


@quick_jit
def logits_of(model: K3, tokens, segment_ids=None):
    """The public call in float32."""
    return model(tokens, segment_ids, jnp.float32)


@quick_jit
def outputs_of(model: K3, tokens, segment_ids=None):
    """float32 logits, and the running sum after every layer [L, B, T, D]: what enters the next one, and the last."""
    sums = []

    def keep_inputs(layers, policy, groups, numbers, r, segment_ids):
        bank = depth.empty_bank(r, layers.config)
        r, bank, reports, kept = depth.forward(layers, policy, groups, numbers, r, bank, segment_ids)
        sums.extend(x for runs in kept for x in _in_order([run["layer_input"] for run in runs]))
        sums.append(r[None])
        return r, bank, reports

    with mock.patch.object(transformer, "run_layers", keep_inputs):
        logits = model(tokens, segment_ids, jnp.float32)
    return logits, jnp.concatenate(sums)[1:]


def _in_order(runs):
    """The layers of a group, one period after the other."""
    return [run[i] for i in range(runs[0].shape[0]) for run in runs]


@quick_jit
def extend(model: K3, tokens, valid, cache):
    """float32 logits of more positions, and the cache after them."""
    h, cache = model.extend(tokens, valid, cache, jnp.float32)
    return model.logits(h), cache


def run_of(model: K3Config, mesh: MeshConfig) -> RunConfig:
    """A training run of small batches, never started: its step is traced only."""
    data, optimizer = DataConfig(sequence_length=16, batch_size=8), OptimizerConfig(learning_rate=1e-2)
    return RunConfig("traced", model, data, optimizer, TrainConfig(1, compute_dtype="float32", loss_chunk=8), mesh)
