"""Block Attention Residuals (report §2.2) in their two-phase form (§5.4.2).

At the first layer of a block the running sum r becomes a row of the bank, and phase 1 describes the bank to all 2S
sites that will read it: peak of the scores, sum of exp(score - peak), and the same sum of rows. A site then adds one
source, r.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decode.config import LANES
from pallas_kernels.decode.core import F32, LOWEST, Core

HIGHEST = lax.Precision.HIGHEST


def empty_bank(core: Core) -> None:
    """For layer 0's attention, at site 0: nothing but r."""
    b = core.buffers
    b.bank[...], b.summary[0] = jnp.zeros_like(b.bank), jnp.zeros(b.summary.shape[1:], F32)
    lane = lax.broadcasted_iota(jnp.int32, b.summary_scores.shape[1:], 1)
    b.summary_scores[0] = jnp.where(lane < LANES, LOWEST, 0.0)


def start_block(core: Core, block) -> None:
    """Phase 1 of AttnRes block number `block`; the first one's keys are there."""
    b, sites = core.buffers, 2 * core.config.attn_res_block

    @pl.when(block > 0)
    def _():
        core.load("keys", block).wait()

    @pl.when(block + 1 < core.config.attn_res_blocks)
    def _():
        core.load("keys", block + 1).start()

    keys = b.keys[lax.rem(block, 2)]
    for row in range(core.config.rows):
        b.bank[row, pl.ds(block, 1), :] = b.residual[row : row + 1]
        bank = b.bank[row]
        s = lax.dot_general(keys, bank, (((1,), (1,)), ((), ())), precision=HIGHEST, preferred_element_type=F32)
        squares = lax.dot_general(
            jnp.ones((8, bank.shape[1]), F32),
            bank * bank,
            (((1,), (1,)), ((), ())),
            precision=HIGHEST,
            preferred_element_type=F32,
        )[:1]
        s = s * lax.rsqrt(squares / core.config.own.hidden + core.config.norm_eps)
        s = jnp.where(lax.broadcasted_iota(jnp.int32, s.shape, 1) <= block, s, -jnp.inf)
        peak = jnp.max(s, axis=1, keepdims=True)
        p = jnp.exp(s - peak)
        b.summary[:, row, :] = jnp.dot(p, bank, precision=HIGHEST, preferred_element_type=F32)
        b.summary_scores[:, row, :LANES] = jnp.broadcast_to(peak, (sites, LANES))
        b.summary_scores[:, row, LANES:] = jnp.broadcast_to(jnp.sum(p, axis=1, keepdims=True), (sites, LANES))


def mix(core: Core, site):
    """Phase 2 at site number `site` in reading order, in which layer 0's attention, with no bank, has none: [B, D]."""
    b, sites = core.buffers, 2 * core.config.attn_res_block
    place = lax.rem(site, sites)
    key = b.keys[lax.rem(lax.div(site, sites), 2), pl.ds(place, 1), :]
    r = b.residual[...]
    inverse_rms = lax.rsqrt(jnp.sum(r * r, axis=1, keepdims=True) / core.config.own.hidden + core.config.norm_eps)
    s = jnp.sum(r * key, axis=1, keepdims=True) * inverse_rms
    peak, weight = b.summary_scores[place, :, :1], b.summary_scores[place, :, LANES : LANES + 1]
    top = jnp.maximum(peak, s)
    old, new = jnp.exp(peak - top), jnp.exp(s - top)
    total = old * weight + new
    return (old / total) * b.summary[place] + (new / total) * r
