"""The channel mixers: the dense FFN, and Stable LatentMoE (report §2.3)."""

import jax.numpy as jnp

from pallas_kernels.decode import experts, router
from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.config import LANES, round_up
from pallas_kernels.decode.core import Core, pad_lanes
from pallas_kernels.decode.plan import VECTORS
from pallas_kernels.decode.reference import rms, situ
from pallas_kernels.decode.ring import Ring


def dense(core: Core, ring: Ring, links: Links, x, start) -> None:
    """The output for x [B, D] into `change`; the layer's tiles begin at `start`."""
    part, c = core.plan.tape.dense, core.config
    width = c.share(c.dense)
    hidden = ring.product(part, start, "hidden", x)
    gate, up = hidden[:, :width], hidden[:, round_up(width, LANES) :][:, :width]
    hidden = situ(gate, up, c.situ_beta, c.situ_linear_beta)
    links.start_sum("dense_sum", ring.product(part, start, "output", hidden))
    core.buffers.change[...] = links.finish_sum("dense_sum", c.hidden)


def latent_moe(core: Core, ring: Ring, links: Links, x, vectors, number, start) -> None:
    """up(rms(sum_j p_j E_j(down x))) + shared(x) for x [B, D] of MoE layer `number`, into `change`.

    The shared experts' two products are made while an exchange of the routed ones is on its way.
    """
    part, c = core.plan.tape.moe, core.config
    links.start("route", _route(core, ring, x, start))
    links.start("shared", _shared_hidden(core, ring, x, start))
    links.finish("route")
    logits, z = (
        links.gathered("route", c.share(width), sum(core.plan.route_lanes[:i]))
        for i, width in enumerate((c.moe.experts, c.moe.latent))
    )
    vector = lambda name, width: vectors[VECTORS.index(name) : VECTORS.index(name) + 1, :width]  # noqa: E731
    router.choose(core, logits, vector("router_bias", c.moe.experts))
    experts.start(core, number)
    links.start_sum("latent_sum", experts.finish(core, number, z))
    links.finish("shared")
    shared = ring.product(part, start, "shared_out", links.gathered("shared", c.share(c.moe.shared)))
    u = rms(links.finish_sum("latent_sum", c.moe.latent), c.norm_eps, c.own.latent)
    u = u * vector("latent_norm", c.moe.latent)
    y = core.round(ring.product(part, start, "up", u)) + core.round(shared)
    links.start("hidden", pad_lanes(y, core.plan.exchanges["hidden"].shape[1]))
    links.finish("hidden")
    core.buffers.change[...] = links.gathered("hidden", c.share(c.hidden))


def _route(core: Core, ring: Ring, x, start):
    """What the other ranks need of this one: router logits and latents."""
    part = core.plan.tape.moe
    z = core.round(ring.product(part, start, "down", x))
    parts = zip((ring.product(part, start, "router", x), z), core.plan.route_lanes, strict=True)
    return jnp.concatenate([pad_lanes(value, lanes) for value, lanes in parts], axis=1)


def _shared_hidden(core: Core, ring: Ring, x, start):
    """This rank's part of the shared experts' hidden layer."""
    c = core.config
    gate, up = jnp.split(ring.product(core.plan.tape.moe, start, "shared_in", x), 2, axis=1)
    hidden = core.round(situ(gate, up, c.situ_beta, c.situ_linear_beta))
    return pad_lanes(hidden, core.plan.exchanges["shared"].shape[1])
