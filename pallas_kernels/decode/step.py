"""The decode step: all layers of the model in one kernel without a grid, on one of the ranks that take part."""

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.decode import attn_res, channels, head, kda, mla
from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.core import I32, Core, semaphores
from pallas_kernels.decode.plan import VECTORS, Plan
from pallas_kernels.decode.reference import rms
from pallas_kernels.decode.ring import Ring

AXIS = "ranks"
COLLECTIVE_ID = 7
VMEM_LIMIT = 62 * 2**20


def decode_step(plan: Plan, token: Int[Array, " B"], position: Int[Array, " B"], weights: dict, caches: dict):
    """One step on one rank, inside a `shard_map` over `AXIS`: ({token, logits}, caches).

    `token` stands at `position` (negative: the row is idle and its caches stay); arrays as `plan` describes them. The
    caches are updated where they are.
    """
    table = jnp.asarray(plan.layer_table, I32)
    smem, hbm, vmem = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.HBM, pltpu.VMEM))
    scalars = (table, token, position)
    weights = {name: weights[name] for name in plan.weights}
    caches = {name: caches[name] for name in plan.caches}
    first = len(scalars) + len(weights)
    *outputs, new_caches = _split(
        pl.pallas_call(
            partial(_kernel, plan),
            name="decode_step",
            in_specs=[*[smem] * len(scalars), *[hbm] * (len(weights) + len(caches))],
            out_specs=[*[vmem] * len(plan.outputs), *[hbm] * len(caches)],
            out_shape=[*plan.outputs.values(), *plan.caches.values()],
            input_output_aliases={first + i: len(plan.outputs) + i for i in range(len(caches))},
            scratch_shapes=_scratch(plan),
            compiler_params=pltpu.CompilerParams(
                collective_id=COLLECTIVE_ID, vmem_limit_bytes=VMEM_LIMIT, has_side_effects=True
            ),
        )(*scalars, *weights.values(), *caches.values()),
        (len(plan.outputs),),
    )
    return dict(zip(plan.outputs, outputs[0], strict=True)), dict(zip(plan.caches, new_caches, strict=True))


def _scratch(plan: Plan) -> list:
    """VMEM, SMEM and semaphores, in the order in which `_kernel` takes them."""
    buffers = [*plan.buffers.values(), *plan.exchange_buffers.values()]
    dma, count = pltpu.SemaphoreType.DMA, len(plan.exchanges)
    return [
        *(pltpu.VMEM(x.shape, x.dtype) for x in buffers),
        *(pltpu.SMEM(plan.buffers[name].shape, plan.buffers[name].dtype) for name in ("chosen", "weights")),
        *(dma((size,)) for size in semaphores(plan).values()),
        dma((count,)),
        dma((count,)),
    ]


def _split(values: Iterable, sizes: tuple[int, ...]) -> list[list]:
    """Runs of these lengths, then the rest."""
    values, parts = list(values), []
    for size in sizes:
        parts.append(values[:size])
        values = values[size:]
    return [*parts, values]


def _named(names: Iterable[str], refs: list) -> SimpleNamespace:
    return SimpleNamespace(**dict(zip(names, refs, strict=True)))


def _kernel(plan: Plan, table, token, position, *refs) -> None:
    kinds = (plan.weights, plan.caches, plan.outputs, plan.caches, plan.buffers, plan.exchange_buffers)
    kinds = (*kinds, ("chosen", "weights"), semaphores(plan))
    weights, _, outputs, caches, buffers, exchanges, scalars, copies, links = _split(refs, tuple(map(len, kinds)))
    rank = lax.axis_index(AXIS)
    core = Core(
        plan,
        rank,
        table,
        position,
        _named(plan.weights, weights),
        _named(plan.caches, caches),
        _named(plan.buffers, buffers),
        _named(semaphores(plan), copies),
    )
    links = Links(plan, rank, _named(plan.exchange_buffers, exchanges), *links)
    _step(core, Ring(core), links, _named(("chosen", "weights"), scalars), token, _named(plan.outputs, outputs))


def _step(core: Core, ring: Ring, links: Links, scalars, token, out) -> None:
    c, b = core.config, core.buffers
    links.barrier()
    ring.prime()
    for name in ("vectors", "keys", *kda.STATE):
        core.load(name, 0).start()
    core.load("keys", 0).wait()
    b.bank[...] = jnp.zeros_like(b.bank)
    head.embed(core, links, token)
    pl.loop(0, len(c.layers))(partial(_layer, core, ring, links, scalars))
    kda.finish(core)
    core.load("vectors", len(c.layers)).wait()
    final_norm = b.vectors[len(c.layers) % 2, :1]
    h = attn_res.mix(core, jnp.int32(2 * len(c.layers) - 1))
    head.choose(core, ring, links, rms(h, c.norm_eps) * final_norm, out.logits, out.token)


def _layer(core: Core, ring: Ring, links: Links, scalars, layer) -> None:
    """Mixer and channels, each of a mixture over the blocks before and the running sum."""
    c, b = core.config, core.buffers
    is_mla, is_moe, kda_number, mla_number, moe_number, mixer_start, channels_start = (
        core.table[layer, i] for i in range(7)
    )
    vectors = _vectors(core, layer)
    weight = lambda name: vectors[VECTORS.index(name) : VECTORS.index(name) + 1]  # noqa: E731
    first = lax.rem(layer, c.attn_res_block) == 0

    h = jnp.where(layer == 0, b.residual[...], attn_res.mix(core, jnp.maximum(2 * layer - 1, 0)))
    x = rms(h, c.norm_eps) * weight("attn_norm")
    pl.when(first)(lambda: attn_res.start_block(core, lax.div(layer, c.attn_res_block)))
    pl.when(is_mla == 0)(lambda: kda.mixer(core, ring, links, x, kda_number, mixer_start))
    pl.when(is_mla == 1)(lambda: mla.mixer(core, ring, links, x, vectors, mla_number, mixer_start))
    b.residual[...] = jnp.where(first, 0.0, b.residual[...]) + b.change[...]

    x = rms(attn_res.mix(core, 2 * layer), c.norm_eps) * weight("ffn_norm")
    pl.when(is_moe == 0)(lambda: channels.dense(core, ring, links, x, channels_start))
    pl.when(is_moe == 1)(
        lambda: channels.latent_moe(core, ring, links, scalars, x, vectors, moe_number, channels_start)
    )
    b.residual[...] = b.residual[...] + b.change[...]


def _vectors(core: Core, layer):
    """The layer's vectors [rows, D]; the next layer's are then on their way."""
    core.load("vectors", layer).wait()
    core.load("vectors", layer + 1).start()
    return core.buffers.vectors[lax.rem(layer, 2)]
