"""The optimizer: which parameter follows which rule, as data, and the Optax transformation made of it.

K3's own list is not published. This one follows the report's sentence (Q, K and V projections per head, other matrices
whole, §2.5) and public ports of it; what no source says is marked as ours.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from k3_jax.config import K3Config, OptimizerConfig
from k3_jax.train.muon import MuonRule, bind, scale_by_muon
from k3_jax.train.schedule import learning_rate


@dataclass(frozen=True)
class AdamWRule:
    """AdamW, with the run's weight decay or without."""

    decays: bool
    kind: str = "elementwise"


@dataclass(frozen=True)
class FrozenRule:
    """No gradient step: the parameter is set by other means."""

    kind: str = "set by Quantile Balancing"


Rule = MuonRule | AdamWRule | FrozenRule
_OPTIMIZER = {MuonRule: "muon", AdamWRule: "adamw", FrozenRule: "none"}

# Letters as in the parameters' shapes; the sets of names are disjoint, and together all of a model.
RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    # per head
    (MuonRule("D H K", rows="D", columns="K"), ("kda.q", "kda.k", "kda.v", "kda.g")),
    (MuonRule("R H K", rows="R", columns="K"), ("kda.f_b",)),
    (MuonRule("Q H N+R", rows="Q", columns="N+R"), ("mla.q_b",)),
    (MuonRule("C H N|V", rows="C", columns="N|V"), ("mla.kv_b",)),
    (MuonRule("D H V", rows="D", columns="V"), ("mla.g",)),
    # per expert
    (MuonRule("E L F", rows="L", columns="F"), ("moe.w1", "moe.w3")),
    (MuonRule("E F L", rows="F", columns="L"), ("moe.w2",)),
    # whole
    (MuonRule("H K D", rows="H K", columns="D"), ("kda.o",)),
    (MuonRule("H V D", rows="H V", columns="D"), ("mla.o",)),
    (MuonRule("D R", rows="D", columns="R"), ("kda.f_a",)),
    (MuonRule("D Q", rows="D", columns="Q"), ("mla.q_a",)),
    (MuonRule("D C|R", rows="D", columns="C|R"), ("mla.kv_a",)),
    (MuonRule("D E", rows="D", columns="E"), ("moe.router",)),
    (MuonRule("D L", rows="D", columns="L"), ("moe.latent_down",)),
    (MuonRule("L D", rows="L", columns="D"), ("moe.latent_up",)),
    (
        MuonRule("D F", rows="D", columns="F"),
        ("dense.gate", "dense.up", "moe.shared.gate", "moe.shared.up"),
    ),
    (MuonRule("F D", rows="F", columns="D"), ("dense.down", "moe.shared.down")),
    # AdamW. The report decays "throughout"; that the second group is exempt is ours. `kda.b` has one row per head:
    # its blocks would be of rank 1.
    (AdamWRule(decays=True), ("embed", "lm_head", "kda.b", "kda.q_conv", "kda.k_conv", "kda.v_conv")),
    (
        AdamWRule(decays=False),
        (
            *("norm", "attn_norm", "ffn_norm", "kda.o_norm", "mla.q_a_norm", "mla.kv_a_norm", "moe.latent_norm"),
            *("attn_res.norm", "attn_res.query", "ffn_res.norm", "ffn_res.query"),
            *("output_attn_res.norm", "output_attn_res.query"),
            *("kda.A_log", "kda.dt_bias"),
        ),
    ),
    (FrozenRule(), ("moe.router_bias",)),
)


def rule_of(name: str, rules: Iterable[tuple[Rule, tuple[str, ...]]] = RULES) -> Rule:
    """The one rule of a canonical name (`layers.7.kda.q` or `kda.q`).

    Raises ValueError naming the parameter if it has none or several.
    """
    base = re.sub(r"^layers\.\d+\.", "", name)
    found = [rule for rule, names in rules for listed in names if listed == base]
    if len(found) != 1:
        raise ValueError(f"parameter {name!r} has {len(found)} optimizer rules, expected exactly one: {found}")
    return found[0]


def _piece_sizes(model: K3Config) -> dict[str, int]:
    """Sizes of the letters around a bar in RULES."""
    mla = model.mla
    return {"C": mla.kv_lora_rank, "R": mla.qk_rope_head_dim, "N": mla.qk_nope_head_dim, "V": mla.v_head_dim}


def make_optimizer(
    config: OptimizerConfig,
    names: Any,
    total_steps: int,
    *,
    model: K3Config,
    ns_dtype: DTypeLike,
) -> optax.GradientTransformation:
    """Clip by global norm, Per-Head Muon or AdamW, decoupled weight decay, learning rate.

    `names` is a pytree with the leaves of the parameters in their order: canonical names without `layers.N.`; leaves
    may have stacked axes in front of the canonical shape. Moments are float32 and as the parameters are sharded; the
    updates are float32. `ns_dtype` is the precision of Muon's products: bfloat16 is standard.
    Raises ValueError naming a parameter without exactly one rule or of an impossible shape.
    """
    name_list = jax.tree.leaves(names)
    rules = [rule_of(name) for name in name_list]
    muon = scale_by_muon(
        [(name, rule) for name, rule in zip(name_list, rules, strict=True) if isinstance(rule, MuonRule)],
        _piece_sizes(model),
        momentum=config.momentum,
        steps=config.ns_steps,
        rms=config.update_rms,
        dtype=ns_dtype,
    )
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    schedule = learning_rate(config, total_steps)
    return _in_float32(
        optax.chain(
            # first, so that whatever stands in a frozen leaf's gradient does not count in the global norm
            optax.freeze(_like_params([isinstance(rule, FrozenRule) for rule in rules])),
            optax.clip_by_global_norm(config.grad_clip),
            optax.partition(
                {"muon": muon, "adamw": adam, "none": optax.set_to_zero()},
                _like_params([_OPTIMIZER[type(rule)] for rule in rules]),
            ),
            optax.add_decayed_weights(config.weight_decay, _like_params([_decays(rule) for rule in rules])),
            # update n (from 1) takes the schedule's value at n: at 0 it would be zero
            optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
        )
    )


def _decays(rule: Rule) -> bool:
    return isinstance(rule, MuonRule) or (isinstance(rule, AdamWRule) and rule.decays)


def _like_params(leaves: Sequence[Any]) -> Callable[[optax.Params], Any]:
    """Params -> a tree of its structure with these leaves. A function: Optax would call a tree that is a model."""

    def labels(params: optax.Params) -> Any:
        structure = jax.tree.structure(params)
        if structure.num_leaves != len(leaves):
            raise ValueError(f"the optimizer was made for {len(leaves)} parameters and got {structure.num_leaves}")
        return jax.tree.unflatten(structure, leaves)

    return labels


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on float32 copies: moments and norms never see bfloat16."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params):
        return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(lambda params: inner.init(cast(params)), update)


@dataclass(frozen=True)
class OptimizerRow:
    """One line of `k3 plan --optimizer`: `count` parameters of this name and shape, each cut into `blocks`.

    `scale` is what an orthogonal block is multiplied by (one number per piece); empty for other optimizers.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    optimizer: str
    kind: str
    blocks: int
    block_shapes: tuple[tuple[int, int], ...]
    scale: tuple[float, ...]
    weight_decay: float


def describe(config: OptimizerConfig, model: K3Config, shapes: Mapping[str, Sequence[int]]) -> list[OptimizerRow]:
    """Canonical names (with or without `layers.N.`) and shapes -> what the optimizer does, equal lines counted."""
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, shape in shapes.items():
        key = (re.sub(r"^layers\.\d+\.", "", name), tuple(shape))
        counts[key] = counts.get(key, 0) + 1
    return [_row(config, model, name, shape, count) for (name, shape), count in counts.items()]


def _row(config: OptimizerConfig, model: K3Config, name: str, shape: tuple[int, ...], count: int) -> OptimizerRow:
    rule = rule_of(name)
    decay = config.weight_decay if _decays(rule) else 0.0
    optimizer = _OPTIMIZER[type(rule)]
    if not isinstance(rule, MuonRule):
        return OptimizerRow(name, shape, count, optimizer, rule.kind, 0, (), (), decay)
    blocks = bind(rule, name, shape, _piece_sizes(model))
    rows = math.prod(shape[i] for i in blocks.rows)
    pieces = tuple((rows, width) for width in blocks.widths)
    number = math.prod(shape[i] for i in blocks.batch) * len(pieces)
    scale = tuple(config.update_rms * math.sqrt(max(piece)) for piece in pieces)
    return OptimizerRow(name, shape, count, optimizer, rule.kind, number, pieces, scale, decay)
