"""Depth: which layers are scanned together, and the scan itself, forward and backward.

Layers of one kind share a traced body. The unit is the mixer period: K3's 93 layers are
`layer 0 | 1, 2 | 22 x (MLA, 3 KDA) | 91, 92`, found from the layer lists for any configuration.

`run_layers` is a custom_vjp because of the AttnRes bank. Autodiff of a scan would save the bank once per layer. The
bank is append-only and a layer reads only the rows that existed before it, so the final bank serves every layer: the
backward pass recomputes each layer from its saved input r and that one bank.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from k3_jax.config import K3Config
from k3_jax.nn.block import Block, Kind, kind


@dataclass(frozen=True)
class Stage:
    """`repeat` times the runs (kind, count) one after another, from layer `first` on."""

    first: int
    repeat: int
    runs: tuple[tuple[Kind, int], ...]

    @property
    def num_layers(self) -> int:
        return self.repeat * sum(count for _, count in self.runs)

    def layers(self, run: int) -> np.ndarray:
        """Layer numbers of a run, [repeat, count]."""
        period = sum(count for _, count in self.runs)
        offset = sum(count for _, count in self.runs[:run])
        starts = self.first + offset + period * np.arange(self.repeat)
        return (starts[:, None] + np.arange(self.runs[run][1])[None]).astype(np.int32)


def plan_stages(config: K3Config) -> tuple[Stage, ...]:
    """Run-length encode the kinds, then fold a pair of runs that repeats."""
    runs: list[tuple[Kind, int]] = []
    for layer in range(config.num_layers):
        k = kind(config, layer)
        if runs and runs[-1][0] == k:
            runs[-1] = (k, runs[-1][1] + 1)
        else:
            runs.append((k, 1))
    stages, first, i = [], 0, 0
    while i < len(runs):
        pair, repeat = runs[i : i + 2], 1
        while len(pair) == 2 and runs[i + 2 * repeat : i + 2 * repeat + 2] == pair:
            repeat += 1
        stage = Stage(first, repeat, tuple(pair)) if repeat > 1 else Stage(first, 1, (runs[i],))
        stages.append(stage)
        first, i = first + stage.num_layers, i + len(stage.runs) * stage.repeat
    return tuple(stages)


Stages = list[list[Block]]  # per stage and run, blocks stacked [repeat, count, ...]


def _layers(config: K3Config, *parts: list[list]) -> list[list[tuple]]:
    """Per stage and run, what the scan gives to each layer: its number, then its share of every part."""
    numbers = [[stage.layers(run) for run in range(len(stage.runs))] for stage in plan_stages(config)]
    return [list(zip(*runs, strict=True)) for runs in zip(numbers, *parts, strict=True)]


def _scan(layer, carry, stages: list[list[tuple]], reverse: bool = False):
    """`layer` over all layers in their order, or from the last to the first. Outputs are arranged like `stages`."""
    order = reversed if reverse else iter

    def period(carry, runs):
        outputs = []
        for run in order(runs):
            carry, output = jax.lax.scan(layer, carry, run, reverse=reverse)
            outputs.append(output)
        return carry, list(order(outputs))

    outputs = []
    for runs in order(stages):
        carry, output = jax.lax.scan(period, carry, runs, reverse=reverse)
        outputs.append(output)
    return carry, list(order(outputs))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_layers(
    config: K3Config, stages: Stages, r: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]
) -> tuple[Float[Array, "B T D"], Float[Array, "N B T D"], list]:
    """All layers. Returns the running sum, the bank, and each run's reports stacked [repeat, count, ...].

    Reports (router statistics, AttnRes entropies) carry no gradient: K3 has no auxiliary loss.
    """
    r, bank, reports, _ = _forward(config, stages, r, segment_ids)
    return r, bank, reports


def _forward(config, stages, r, segment_ids):
    def layer(carry, x):
        r, bank = carry
        index, block = x
        bank = _push(bank, r, index, config)
        r_next, report = block(index, r, bank, segment_ids)
        return (r_next, bank), (r, report)

    (r, bank), outputs = _scan(layer, (r, _empty_bank(r, config)), _layers(config, stages))
    inputs = [[r_in for r_in, _ in runs] for runs in outputs]
    return r, bank, [[report for _, report in runs] for runs in outputs], inputs


def _empty_bank(r, config: K3Config):
    return jnp.broadcast_to(r[None] * 0, (config.num_attn_res_blocks, *r.shape))  # laid out like r


def _push(bank, r, index, config: K3Config):
    row = index // config.attn_res_block
    old = jax.lax.dynamic_index_in_dim(bank, row, 0, keepdims=False)
    new = jnp.where(index % config.attn_res_block == 0, r, old)
    return jax.lax.dynamic_update_index_in_dim(bank, new, row, 0)


def _run_layers_fwd(config, stages, r, segment_ids):
    r, bank, reports, inputs = _forward(config, stages, r, segment_ids)
    return (r, bank, reports), (stages, bank, inputs, segment_ids)


def _run_layers_bwd(config, saved, cotangents):
    stages, bank, inputs, segment_ids = saved
    dr, dbank, _ = cotangents
    S = config.attn_res_block

    def layer(carry, x):
        dr, dbank = carry
        # Nothing of a layer before the gradient has come to it: XLA would recompute several layers, or keep gathered
        # weights since the forward pass.
        index, block, r, dr = jax.lax.optimization_barrier((*x, dr))
        _, vjp = jax.vjp(lambda block, r, bank: block(index, r, bank, segment_ids)[0], block, r, bank)
        dblock, dr, dbank_here = vjp(dr)
        dbank = dbank + dbank_here.astype(jnp.float32)
        # Undo the push: what later layers wanted of this row goes to r.
        row, first = index // S, index % S == 0
        wanted = jax.lax.dynamic_index_in_dim(dbank, row, 0, keepdims=False)
        dr = dr + jnp.where(first, wanted, 0).astype(dr.dtype)
        dbank = jax.lax.dynamic_update_index_in_dim(dbank, jnp.where(first, 0, wanted), row, 0)
        return (dr, dbank), dblock

    layers = _layers(config, stages, inputs)
    (dr, _), dstages = _scan(layer, (dr, dbank.astype(jnp.float32)), layers, reverse=True)
    # The bank starts as 0 * r: its remaining cotangent is dropped.
    return dstages, dr, None


run_layers.defvjp(_run_layers_fwd, _run_layers_bwd)


def run_layers_cached(
    config: K3Config, stages: Stages, r, segment_ids, start, caches, keys, summary
) -> tuple[Float[Array, "B T D"], object, list]:
    """Inference: the layers with their caches (stacked like the blocks) and the two-phase AttnRes."""

    def layer(carry, x):
        index, block, cache = x
        *carry, cache = block.extend(index, *carry, keys, segment_ids, start, cache)
        return tuple(carry), cache

    carry = (r, _empty_bank(r, config), summary)
    (r, _, summary), caches = _scan(layer, carry, _layers(config, stages, caches))
    return r, summary, caches
