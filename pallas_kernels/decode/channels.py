"""The channel mixers: the dense FFN, and Stable LatentMoE (report §2.3)."""

import jax.numpy as jnp

from pallas_kernels.decode import experts, router
from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.config import LANES, round_up
from pallas_kernels.decode.core import Core
from pallas_kernels.decode.plan import VECTORS
from pallas_kernels.decode.reference import rms, situ
from pallas_kernels.decode.ring import Ring


def dense(core: Core, ring: Ring, links: Links, x, start) -> None:
    """Add the output for x [B, D] to `residual`; the layer's tiles begin at `start`."""
    part, c = core.plan.tape.dense, core.config
    width = c.share(c.dense)
    hidden = ring.product(part, start, "hidden", x)
    gate, up = hidden[:, :width], hidden[:, round_up(width, LANES) :][:, :width]
    hidden = situ(gate, up, c.situ_beta, c.situ_linear_beta)
    links.start_sum("dense_sum", ring.product(part, start, "output", hidden))
    core.buffers.residual[...] += links.finish_sum("dense_sum", c.hidden)


def latent_moe(core: Core, ring: Ring, links: Links, x, vectors, number, start) -> None:
    """Add up(rms(sum_j p_j E_j(down x))) + shared(x), for x [B, D] of MoE layer `number`, to `residual`.

    All but the chain of four exchanges is made while one of them is on its way.
    """
    part, c = core.plan.tape.moe, core.config
    vector = lambda name, width: vectors[VECTORS.index(name) : VECTORS.index(name) + 1, :width]  # noqa: E731

    links.start_padded("route", ring.product(part, start, "router", x))
    links.start_padded("latents", core.round(ring.product(part, start, "down", x)))
    links.start_padded("shared", _shared_hidden(core, ring, x, start))
    links.finish("route")
    logits = links.gathered("route", c.share(c.moe.experts))
    p = router.choose(core, logits, vector("router_bias", c.moe.experts))
    experts.start(core, number)
    router.weigh(core, p)
    links.finish("latents")
    links.start_sum("latent_sum", experts.finish(core, number, links.whole("latents", c.moe.latent)))
    links.finish("shared")
    hidden = links.gathered("shared", c.share(c.moe.shared))
    shared = core.round(ring.product(part, start, "shared_out", hidden))
    u = rms(links.finish_sum("latent_sum", c.moe.latent), c.norm_eps, c.own.latent)
    u = u * vector("latent_norm", c.moe.latent)
    links.start_padded("hidden", core.round(ring.product(part, start, "up", u)) + shared)
    links.finish("hidden")
    core.buffers.residual[...] += links.whole("hidden", c.hidden)


def _shared_hidden(core: Core, ring: Ring, x, start):
    """This rank's part of the shared experts' hidden layer."""
    c = core.config
    gate, up = jnp.split(ring.product(core.plan.tape.moe, start, "shared_in", x), 2, axis=1)
    return core.round(situ(gate, up, c.situ_beta, c.situ_linear_beta))
