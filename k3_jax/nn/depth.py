"""Depth: the scan over the layers, forward and backward.

`run_layers` is a custom_vjp because of the AttnRes bank. Autodiff of a scan would save the bank once per layer. The
bank is append-only and a layer reads only the rows that existed before it, so the final bank serves every layer: the
backward pass recomputes each layer from its saved input r and that one bank.

What else is kept of a layer, and in what form, is up to the policy (`activations`).

Layers come as the stacks of a `Depth`, with the number of the layer in each place.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3_jax import sharding
from k3_jax.config import K3Config, Keep
from k3_jax.nn.activations import Policy, named, recording, replaying, restore
from k3_jax.nn.block import Block
from k3_jax.nn.grouping import Depth

Groups = list[list[Block]]  # per group and run, blocks stacked [repeat, count, ...]
Numbers = list[list]  # alike, integers [repeat, count]
Bank = Float[Array, "N B T D"]


def _zip(*parts: list[list]) -> list[list[tuple]]:
    """Per group and run, what the scan gives to each layer: its share of every part."""
    return [list(zip(*runs, strict=True)) for runs in zip(*parts, strict=True)]


def _scan(depth: Depth, layer, carry, groups: list[list[tuple]], reverse: bool = False):
    """`layer` over all layers in their order, or from the last to the first. Outputs are arranged like `groups`."""
    order = reversed if reverse else iter

    def period(gaps, carry, runs):
        outputs = []
        for gap, run in order(list(zip(gaps, runs, strict=True))):
            carry, output = jax.lax.scan(_where_present(layer) if gap else layer, carry, run, reverse=reverse)
            outputs.append(output)
        return carry, list(order(outputs))

    outputs = []
    for gaps, runs in order(list(zip(depth.gaps, groups, strict=True))):
        carry, output = jax.lax.scan(partial(period, gaps), carry, runs, reverse=reverse)
        outputs.append(output)
    return carry, list(order(outputs))


def _where_present(layer):
    """`layer`; in a place without one the carry stays, and what it would give is zero."""

    def skip(carry, x):
        outputs = jax.eval_shape(lambda: layer(carry, x)[1])  # as arguments they would lose their layout on a pipeline
        return carry, jax.tree.map(sharding.zeros_like, outputs)

    return lambda carry, x: jax.lax.cond(x[0] >= 0, layer, skip, carry, x)


INPUT = Keep("layer_input")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_layers(
    depth: Depth,
    policy: Policy,
    groups: Groups,
    numbers: Numbers,
    r: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
) -> tuple[Float[Array, "B T D"], Bank, list]:
    """All layers. Returns the running sum, the bank, and each run's reports stacked [repeat, count, ...].

    Reports (router statistics, AttnRes entropies) carry no gradient: K3 has no auxiliary loss.
    """
    return forward(depth, policy, groups, numbers, r, empty_bank(r, depth.config), segment_ids)[:3]


def forward(depth: Depth, policy: Policy, groups: Groups, numbers: Numbers, r, bank: Bank, segment_ids):
    """(running sum, bank, reports, what is kept of every layer) of layers that find `bank` as those before left it."""
    policy = _with_input(policy)

    def layer(carry, x):
        r, bank = carry
        index, block = x
        bank = _push(bank, r, index, depth.config)
        with recording(policy) as kept:
            r_next, report = block(index, named(INPUT.name, r), bank, segment_ids)
        return (r_next, bank), (kept, report)

    (r, bank), outputs = _scan(depth, layer, (r, bank), _zip(numbers, groups))
    kept, reports = ([[run[i] for run in runs] for runs in outputs] for i in range(2))
    return r, bank, reports, kept


def _with_input(policy: Policy) -> Policy:
    return policy if INPUT.name in {keep.name for keep in policy} else (*policy, INPUT)


def backward(
    depth: Depth, policy: Policy, groups: Groups, numbers: Numbers, bank: Bank, kept: list, segment_ids, dr, dbank
):
    """Gradients of the blocks, of the input r and of the bank that `forward` found, in float32; those of rows that it
    wrote itself are zero. `bank` is the one that it left, `dbank` its cotangent."""
    policy, S = _with_input(policy), depth.config.attn_res_block
    (of_input,) = (keep for keep in policy if keep.name == INPUT.name)

    def layer(carry, x):
        dr, dbank = carry
        # Nothing of a layer before the gradient has come to it: XLA would recompute several layers, or keep gathered
        # weights since the forward pass.
        index, block, kept = x
        r = restore(of_input, kept[INPUT.name], dr.dtype)
        index, block, r, dr = jax.lax.optimization_barrier((index, block, r, dr))
        with replaying(policy, kept):
            _, vjp = jax.vjp(lambda block, r, bank: block(index, r, bank, segment_ids)[0], block, r, bank)
        dblock, dr, dbank_here = vjp(dr)
        dbank = dbank + dbank_here.astype(jnp.float32)
        # Undo the push: what later layers wanted of this row goes to r.
        row, first = index // S, index % S == 0
        wanted = jax.lax.dynamic_index_in_dim(dbank, row, 0, keepdims=False)
        dr = dr + jnp.where(first, wanted, 0).astype(dr.dtype)
        dbank = jax.lax.dynamic_update_index_in_dim(dbank, jnp.where(first, 0, wanted), row, 0)
        return (dr, dbank), dblock

    layers = _zip(numbers, groups, kept)
    (dr, dbank), dgroups = _scan(depth, layer, (dr, dbank.astype(jnp.float32)), layers, reverse=True)
    return dgroups, dr, dbank


def empty_bank(r, config: K3Config) -> Bank:
    return jnp.broadcast_to(r[None] * 0, (config.num_attn_res_blocks, *r.shape))  # laid out like r


def _push(bank, r, index, config: K3Config):
    row = index // config.attn_res_block
    old = jax.lax.dynamic_index_in_dim(bank, row, 0, keepdims=False)
    new = jnp.where(index % config.attn_res_block == 0, r, old)
    return jax.lax.dynamic_update_index_in_dim(bank, new, row, 0)


def _run_layers_fwd(depth, policy, groups, numbers, r, segment_ids):
    bank = empty_bank(r, depth.config)
    r, bank, reports, kept = forward(depth, policy, groups, numbers, r, bank, segment_ids)
    return (r, bank, reports), (groups, numbers, bank, kept, segment_ids)


def _run_layers_bwd(depth, policy, saved, cotangents):
    dr, dbank, _ = cotangents
    dgroups, dr, _ = backward(depth, policy, *saved, dr, dbank)
    # The bank starts as 0 * r: its remaining cotangent is dropped.
    return dgroups, None, dr, None


run_layers.defvjp(_run_layers_fwd, _run_layers_bwd)


def run_layers_cached(
    depth: Depth, groups: Groups, numbers: Numbers, r, segment_ids, start, caches, keys, summary
) -> tuple[Float[Array, "B T D"], object, list]:
    """Inference: the layers with their caches (stacked like the blocks) and the two-phase AttnRes."""

    def layer(carry, x):
        index, block, cache = x
        *carry, cache = block.extend(index, *carry, keys, segment_ids, start, cache)
        return tuple(carry), cache

    carry = (r, empty_bank(r, depth.config), summary)
    (r, _, summary), caches = _scan(depth, layer, carry, _zip(numbers, groups, caches))
    return r, summary, caches
