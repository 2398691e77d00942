"""The decode step: all layers of the model in one kernel, on one of the ranks that take part."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.decode import attn_res, channels, head, kda, mla
from pallas_kernels.decode.call import call
from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.core import Core
from pallas_kernels.decode.plan import VECTORS, Plan
from pallas_kernels.decode.reference import rms
from pallas_kernels.decode.ring import Ring
from pallas_kernels.decode.slots import Slots


def decode_step(
    plan: Plan, token: Int[Array, " B"], position: Int[Array, " B"], slots: Slots, weights: dict, caches: dict
) -> tuple[dict, dict]:
    """One step on one rank, inside a `shard_map` over `call.AXIS`: ({token, logits}, caches).

    `token` stands at `position` (negative: the row is idle and changes nothing); `slots` say where in the caches its
    sequence is. Copies of slots are not checked against their number: see `slots.together`. Arrays as `plan` describes
    them; the caches are updated where they are.
    """
    return call(plan, _step, token, position, slots, weights, caches)


def _step(core: Core, ring: Ring, links: Links, out) -> None:
    c, b = core.config, core.buffers
    links.barrier()
    ring.prime()
    for name in ("vectors", "keys"):
        core.load(name, 0).start()
    kda.begin(core)
    core.load("keys", 0).wait()
    attn_res.empty_bank(core)
    head.embed(core, links)
    pl.loop(0, len(c.layers))(partial(_layer, core, ring, links))
    kda.finish(core)
    core.load("vectors", len(c.layers)).wait()
    final_norm = b.vectors[len(c.layers) % 2, :1]
    h = attn_res.mix(core, jnp.int32(2 * len(c.layers) - 1))
    head.choose(core, ring, links, rms(h, c.norm_eps, c.own.hidden) * final_norm, out.logits, out.token)


def _layer(core: Core, ring: Ring, links: Links, layer) -> None:
    """Mixer and channels, each of a mixture over the blocks before and the running sum."""
    c, b = core.config, core.buffers
    is_mla, is_moe, kda_number, mla_number, moe_number, mixer_start, channels_start = (
        core.table[layer, i] for i in range(7)
    )
    vectors = _vectors(core, layer)
    weight = lambda name: vectors[VECTORS.index(name) : VECTORS.index(name) + 1]  # noqa: E731
    first = lax.rem(layer, c.attn_res_block) == 0

    h = attn_res.mix(core, jnp.maximum(2 * layer - 1, 0))
    x = rms(h, c.norm_eps, c.own.hidden) * weight("attn_norm")
    pl.when(is_mla == 0)(lambda: kda.mixer(core, ring, links, x, kda_number, mixer_start))
    pl.when(is_mla == 1)(lambda: mla.mixer(core, ring, links, x, vectors, mla_number, mixer_start))
    pl.when(first)(lambda: attn_res.start_block(core, lax.div(layer, c.attn_res_block)))  # while the sum is on its way
    b.residual[...] = jnp.where(first, 0.0, b.residual[...]) + links.finish_sum("mixer_sum", c.hidden)

    x = rms(attn_res.mix(core, 2 * layer), c.norm_eps, c.own.hidden) * weight("ffn_norm")
    pl.when(is_moe == 0)(lambda: channels.dense(core, ring, links, x, channels_start))
    pl.when(is_moe == 1)(lambda: channels.latent_moe(core, ring, links, x, vectors, moe_number, channels_start))


def _vectors(core: Core, layer):
    """The layer's vectors [rows, D]; the next layer's are then on their way."""
    core.load("vectors", layer).wait()
    core.load("vectors", layer + 1).start()
    return core.buffers.vectors[lax.rem(layer, 2)]
