"""Configuration: frozen dataclasses, checked when they are made.

`K3Config` is the architecture; its fields follow the letters of the report, and layer lists are 0-based
(the released JSON is 1-based: `from_hf` / `to_hf` convert). `RunConfig` is one training run, which a recipe in
`configs/` returns from `get_config()`. Every error names the field, the value and what was expected.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A value that the user must change; the command line prints it without a traceback and exits with 2."""


def _require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{name} = {value!r}: expected {expected}")


def _require_seed(obj: Any) -> None:
    ok = isinstance(obj.seed, int) and not isinstance(obj.seed, bool) and obj.seed >= 0
    _require(ok, f"{type(obj).__name__}.seed", obj.seed, "an integer >= 0")


def _require_positive(obj: Any, *names: str) -> None:
    for name in names:
        value = getattr(obj, name)
        ok = isinstance(value, int) and not isinstance(value, bool) and value > 0
        _require(ok, f"{type(obj).__name__}.{name}", value, "a positive integer")


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention. `gate_lower_bound=None` is the unbounded softplus gate of Kimi Linear."""

    num_heads: int
    head_dim: int
    conv_width: int = 4
    gate_lower_bound: float | None = -5.0

    def __post_init__(self):
        _require_positive(self, "num_heads", "head_dim", "conv_width")
        bound = self.gate_lower_bound
        ok = bound is None or (isinstance(bound, (int, float)) and -5.9 <= bound < 0)
        _require(ok, "KDAConfig.gate_lower_bound", bound, "None or a number in [-5.9, 0)")


@dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention without positions. The latent norms use their own epsilon."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6

    def __post_init__(self):
        _require_positive(
            self, "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        )
        _require(self.latent_norm_eps > 0, "MLAConfig.latent_norm_eps", self.latent_norm_eps, "a positive number")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_dim(self) -> int:
        """Values cached per token and layer: the normalised latent and the shared extra key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE. `quantile_bins` is the resolution of Quantile Balancing's histogram (report, App. D)."""

    num_experts: int
    top_k: int
    latent_dim: int
    expert_dim: int
    shared_dim: int
    routed_scaling_factor: float = 1.0
    renormalize: bool = True
    quantile_bins: int = 1000

    def __post_init__(self):
        _require_positive(self, "num_experts", "top_k", "latent_dim", "expert_dim", "shared_dim", "quantile_bins")
        _require(
            self.top_k < self.num_experts,
            "MoEConfig.top_k",
            self.top_k,
            f"less than num_experts = {self.num_experts} (Quantile Balancing needs the (k+1)-th score)",
        )


@dataclass(frozen=True)
class K3Config:
    """The text model. `mla_layers` holds 0-based indices; every other layer is KDA. `moe=None`: all layers dense."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    kda: KDAConfig
    mla: MLAConfig
    dense_dim: int
    moe: MoEConfig | None
    first_dense_layers: int = 1
    attn_res_block: int = 12
    norm_eps: float = 1e-5
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    init_std: float = 0.02
    max_positions: int = 1048576
    bos_token_id: int = 0
    eos_token_id: int = 0
    pad_token_id: int = 0

    def __post_init__(self):
        _require_positive(
            self, "vocab_size", "hidden_size", "num_layers", "dense_dim", "attn_res_block", "max_positions"
        )
        object.__setattr__(self, "mla_layers", tuple(self.mla_layers))
        inside = all(isinstance(i, int) and 0 <= i < self.num_layers for i in self.mla_layers)
        ordered = list(self.mla_layers) == sorted(set(self.mla_layers))
        _require(
            inside and ordered,
            "K3Config.mla_layers",
            self.mla_layers,
            f"increasing 0-based layer indices below num_layers = {self.num_layers}",
        )
        dense_ok = isinstance(self.first_dense_layers, int) and 0 <= self.first_dense_layers <= self.num_layers
        _require(dense_ok, "K3Config.first_dense_layers", self.first_dense_layers, f"0..{self.num_layers}")
        _require(
            self.moe is not None or self.first_dense_layers == self.num_layers,
            "K3Config.moe",
            None,
            "a MoEConfig, or first_dense_layers = num_layers for a dense model",
        )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and 0 <= value < self.vocab_size,
                f"K3Config.{name}",
                value,
                f"a token below vocab_size = {self.vocab_size}",
            )

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> "K3Config":
        """The architecture that a parsed `config.json` in the released form describes, or its text part alone.

        Raises ConfigError that names the key for anything missing, unknown, of the wrong type or not supported.
        """
        from k3_jax.weights.hf_config import config_from_hf  # it needs this module

        return config_from_hf(data)

    def to_hf(self) -> dict[str, Any]:
        """The released, nested form; `from_hf` of it gives this configuration back."""
        from k3_jax.weights.hf_config import config_to_hf

        return config_to_hf(self)

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_dense_layers

    @property
    def num_attn_res_blocks(self) -> int:
        """Rows of the AttnRes bank: the embedding and each finished block before the last."""
        return -(-self.num_layers // self.attn_res_block)


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; one of them may be -1: all devices that the others leave.

    Rows are cut over `context` or over `zigzag`: into one fragment for each rank in order, or into two, the r-th and
    the r-th from the end, so that causal attention is as much work on every rank.

    `interleave`: chunks of layers on each rank of `pipe`. More of them leave ranks idle for less time, and make more
    messages.
    """

    data: int = 1
    fsdp: int = 1
    pipe: int = 1
    expert: int = 1
    context: int = 1
    zigzag: int = 1
    tensor: int = 1
    interleave: int = 1

    def __post_init__(self):
        sizes = self.axes()
        for name, size in sizes.items():
            ok = isinstance(size, int) and not isinstance(size, bool) and (size > 0 or size == -1)
            _require(ok, f"MeshConfig.{name}", size, "a positive integer, or -1 for the remaining devices")
        _require(list(sizes.values()).count(-1) <= 1, "MeshConfig", sizes, "at most one axis of -1")
        expected = f"1 where MeshConfig.context = {self.context}: rows are cut in one way"
        _require(1 in (self.context, self.zigzag), "MeshConfig.zigzag", self.zigzag, expected)
        _require_positive(self, "interleave")
        _require(self.interleave == 1 or self.pipe != 1, "MeshConfig.interleave", self.interleave, "1 where pipe is 1")

    def axes(self) -> dict[str, int]:
        """The sizes by name."""
        return {name: size for name, size in dataclasses.asdict(self).items() if name != "interleave"}


@dataclass(frozen=True)
class DataConfig:
    """What is read. `source="stdlib"` is the running Python's own library; otherwise a file or a folder.

    `batch_size` counts sequences per optimizer step over all hosts. `chat=True` reads JSONL conversations and
    trains on the assistant's turns only.
    """

    sequence_length: int
    batch_size: int
    source: str = "stdlib"
    tokenizer: str = "bytes"
    text_field: str = "text"
    chat: bool = False
    seed: int = 0

    def __post_init__(self):
        _require_positive(self, "sequence_length", "batch_size")
        _require(self.sequence_length >= 2, "DataConfig.sequence_length", self.sequence_length, "at least 2")
        _require_seed(self)


@dataclass(frozen=True)
class Cosine:
    """Cosine decay to `min_ratio` of the peak over the whole run: K3's choice. The ratio is ours."""

    min_ratio: float = 0.1

    def __post_init__(self):
        _require(0 <= self.min_ratio <= 1, "Cosine.min_ratio", self.min_ratio, "a number in [0, 1]")


@dataclass(frozen=True)
class WarmupStableDecay:
    """Constant rate, then a linear decay to `min_ratio` over the last `decay_fraction` of the run."""

    decay_fraction: float = 0.2
    min_ratio: float = 0.0

    def __post_init__(self):
        _require(0 < self.decay_fraction <= 1, "WarmupStableDecay.decay_fraction", self.decay_fraction, "in (0, 1]")
        _require(0 <= self.min_ratio <= 1, "WarmupStableDecay.min_ratio", self.min_ratio, "a number in [0, 1]")


@dataclass(frozen=True)
class OptimizerConfig:
    """Per-Head Muon for matrices, AdamW for the rest; one learning rate serves both (update RMS `update_rms`).

    K3 discloses weight decay 0.1 and 1 % warm-up; momentum, Newton-Schulz steps and RMS are K2's and Moonlight's; the
    learning rate and AdamW's constants are ours. `qk_clip` is K2's threshold on attention logits (None: off).
    """

    learning_rate: float
    schedule: Cosine | WarmupStableDecay = Cosine()
    warmup_fraction: float = 0.01
    weight_decay: float = 0.1
    momentum: float = 0.95
    ns_steps: int = 5
    update_rms: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    grad_clip: float = 1.0
    qk_clip: float | None = None

    def __post_init__(self):
        _require_positive(self, "ns_steps")
        _require(self.grad_clip > 0, "OptimizerConfig.grad_clip", self.grad_clip, "a positive number (inf: off)")
        for name in ("learning_rate", "update_rms", "eps"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"OptimizerConfig.{name}", value, "a positive finite number")
        for name in ("momentum", "b1", "b2", "warmup_fraction"):
            _require(0 <= getattr(self, name) < 1, f"OptimizerConfig.{name}", getattr(self, name), "a number in [0, 1)")
        _require(self.weight_decay >= 0, "OptimizerConfig.weight_decay", self.weight_decay, "a number >= 0")
        clip_ok = self.qk_clip is None or self.qk_clip > 0
        _require(clip_ok, "OptimizerConfig.qk_clip", self.qk_clip, "None or a positive number")


@dataclass(frozen=True)
class ContextStage:
    """From `start` (fraction of the steps) on, rows are `sequence_length` long; tokens per batch stay the same."""

    start: float
    sequence_length: int

    def __post_init__(self):
        _require_positive(self, "sequence_length")
        _require(0 < self.start < 1, "ContextStage.start", self.start, "a fraction in (0, 1)")


@dataclass(frozen=True)
class Quantize:
    """To FP8 (E4M3) with a float32 scale for every 128 numbers: half the bytes of bfloat16, about 3 % error."""


@dataclass(frozen=True)
class Offload:
    """To the host's memory and back. libtpu 0.0.50 fails to compile it in programs of several layer kinds."""


# Tensors of a layer that its backward pass needs, and where they come from in the forward pass.
ACTIVATIONS = {
    "layer_input": "the running sum before the layer; always kept, from it all others are computed",
    "kda_qkv": "KDA's projections before their convolutions",
    "kda_output": "what the delta rule gives, before gate and norm",
    "mla_latent": "keys and values of MLA, 576 numbers per token",
    "mla_query": "MLA's normalised queries of rank q_lora_rank",
    "mla_output": "what attention gives, before the gate",
    "moe_latent": "the input of the experts",
    "moe_output": "the sum over the experts: with it their products and exchanges are not done again",
    "ffn_hidden": "the hidden layer of the dense FFN or of the shared experts",
}


@dataclass(frozen=True)
class Keep:
    """A tensor of every layer that has it, by its name in ACTIVATIONS, stays from the forward to the backward pass,
    `through` these transformations; all others are computed again."""

    name: str
    through: tuple[Quantize | Offload, ...] = ()

    def __post_init__(self):
        _require(self.name in ACTIVATIONS, "Keep.name", self.name, "one of " + ", ".join(ACTIVATIONS))
        steps = [type(step) for step in self.through]
        ok = steps in ([], [Quantize], [Offload], [Quantize, Offload])
        _require(ok, "Keep.through", self.through, "(), (Quantize(),), (Offload(),) or (Quantize(), Offload())")


@dataclass(frozen=True)
class TrainConfig:
    """The loop. `max_bad_steps` non-finite steps in a row end the run. `loss_chunk` is in tokens per row.

    `z_loss`: weight of the squared log-partition; K3 uses none. `activations`: what layers keep for the backward pass.
    `tpu_options`: "name=value" for XLA, on TPUs only; they
    are those of LIBTPU_INIT_ARGS without the dashes.
    """

    steps: int
    grad_accumulation: int = 1
    checkpoint_every: int = 100
    keep: int = 2
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    seed: int = 0
    compute_dtype: str = "bfloat16"
    loss_chunk: int = 1024
    z_loss: float = 0.0
    max_bad_steps: int = 5
    context_stages: tuple[ContextStage, ...] = ()
    activations: tuple[Keep, ...] = ()
    tpu_options: tuple[str, ...] = ()

    def __post_init__(self):
        _require_positive(
            self,
            "steps",
            "grad_accumulation",
            "checkpoint_every",
            "keep",
            "log_every",
            "eval_every",
            "eval_batches",
            "loss_chunk",
            "max_bad_steps",
        )
        _require_seed(self)
        dtype_ok = self.compute_dtype in ("float32", "bfloat16")
        _require(dtype_ok, "TrainConfig.compute_dtype", self.compute_dtype, "'float32' or 'bfloat16'")
        _require(0 <= self.z_loss < math.inf, "TrainConfig.z_loss", self.z_loss, "a finite number >= 0")
        starts = [stage.start for stage in self.context_stages]
        _require(starts == sorted(set(starts)), "TrainConfig.context_stages", starts, "increasing starts")
        names = [keep.name for keep in self.activations]
        _require(len(names) == len(set(names)), "TrainConfig.activations", names, "each name once")
        for option in self.tpu_options:
            _require(
                re.fullmatch(r"xla_\w+=\w+", option) is not None, "TrainConfig.tpu_options", option, "xla_NAME=VALUE"
            )


@dataclass(frozen=True)
class RunConfig:
    """One training run: what a recipe's `get_config()` returns."""

    name: str
    model: K3Config
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self):
        batch, micro = self.data.batch_size, self.train.grad_accumulation
        _require(batch % micro == 0, "data.batch_size", batch, f"a multiple of train.grad_accumulation = {micro}")
        for stage in self.train.context_stages:
            tokens = batch * self.data.sequence_length
            fits = tokens % (stage.sequence_length * micro) == 0
            _require(
                fits,
                "ContextStage.sequence_length",
                stage.sequence_length,
                f"a divisor of the {tokens} tokens per batch, in whole micro-batches",
            )
