"""Caches of all ranks together, [ranks, ...] as the kernel keeps them, from and to the model's own layout."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.decode.config import DecodeConfig
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.reference import Caches


def to_ranks(plan: Plan, caches: Caches) -> dict[str, Array]:
    """Heads are cut over the ranks; of latents every rank has its tiles (tile t is rank t % cache_ranks's)."""
    c = plan.config
    S = _cut_heads(caches.S, 2, c.ranks)
    conv = jnp.moveaxis(caches.conv, 4, 2)  # [layers, P, H, W - 1, 3, K]
    conv = _cut_heads(conv.reshape(*conv.shape[:3], -1, conv.shape[-1]), 2, c.ranks)
    rows = plan.caches["conv"].shape[3] - conv.shape[4]
    conv = jnp.pad(conv, ((0, 0),) * 4 + ((0, rows), (0, 0)))
    extra = c.key_width - caches.latent.shape[-1]
    latent = jnp.pad(caches.latent, ((0, 0), (0, 0), (0, 0), (0, extra))).astype(c.dtype)
    latent = _tiles(c, latent)
    latent = jnp.moveaxis(latent, 3, 0).reshape(c.cache_ranks, *plan.caches["latent"].shape)
    return {"S": S, "conv": conv, "latent": jnp.tile(latent, (c.ranks // c.cache_ranks, 1, 1, 1, 1))}


def from_ranks(plan: Plan, ranks: dict[str, Array]) -> Caches:
    """The inverse; of latents that every rank holds, those of rank 0."""
    c = plan.config
    S, conv = (jnp.moveaxis(ranks[name], 0, 2) for name in ("S", "conv"))  # [layers, P, N, h, ...]
    S, conv = (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in (S, conv))
    past = 3 * (c.kda.conv_width - 1)
    conv = conv[:, :, :, :past].reshape(*conv.shape[:3], -1, 3, conv.shape[-1])
    latent = ranks["latent"][: c.cache_ranks].astype(jnp.float32)
    latent = latent.reshape(*latent.shape[:3], -1, c.blocks.cache_rows, c.key_width)
    latent = jnp.moveaxis(latent, 0, 3)  # [layers, P, tiles of a rank, ranks, rows, width]
    latent = latent.reshape(*latent.shape[:2], c.capacity, c.key_width)[..., : c.mla.kv_rank + c.mla.pe]
    return Caches(S, jnp.moveaxis(conv, 2, 4), latent)


def _cut_heads(x: Array, axis: int, ranks: int) -> Array:
    cut = x.reshape(*x.shape[:axis], ranks, -1, *x.shape[axis + 1 :])
    return jnp.moveaxis(cut, axis, 0)


def _tiles(c: DecodeConfig, latent: Array) -> Array:
    return latent.reshape(*latent.shape[:2], -1, c.cache_ranks, c.blocks.cache_rows, c.key_width)
