"""A kernel without a grid that has the memory of a decode step: all of a step, or for tests a part of it."""

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.core import I32, Core, semaphores
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.ring import Ring
from pallas_kernels.decode.slots import Slots

AXIS = "ranks"
COLLECTIVE_ID = 7
VMEM_LIMIT = 62 * 2**20
SCALARS = ("chosen", "weights")
Body = Callable[[Core, Ring, Links, SimpleNamespace], None]


def call(
    plan: Plan,
    body: Body,
    token: Int[Array, " B"],
    position: Int[Array, " B"],
    slots: Slots,
    weights: dict,
    caches: dict,
) -> tuple[dict, dict]:
    """body(core, ring, links, out) on one rank, inside a `shard_map` over `AXIS`: (outputs, caches) as in `plan`.

    The caches are updated where they are.
    """
    table = jnp.asarray(plan.layer_table, I32)
    smem, hbm, vmem = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.HBM, pltpu.VMEM))
    scalars = (table, token, position, *slots)
    weights = {name: weights[name] for name in plan.weights}
    caches = {name: caches[name] for name in plan.caches}
    first = len(scalars) + len(weights)
    *outputs, new_caches = _split(
        pl.pallas_call(
            partial(_kernel, plan, body),
            name="decode_step",
            in_specs=[*[smem] * len(scalars), *[hbm] * (len(weights) + len(caches))],
            out_specs=[*[vmem] * len(plan.outputs), *[hbm] * len(caches)],
            out_shape=[*plan.outputs.values(), *plan.caches.values()],
            input_output_aliases={first + i: len(plan.outputs) + i for i in range(len(caches))},
            scratch_shapes=_scratch(plan),
            compiler_params=pltpu.CompilerParams(
                collective_id=COLLECTIVE_ID,
                vmem_limit_bytes=VMEM_LIMIT,
                has_side_effects=True,
                disable_bounds_checks=True,  # of every copy; the choice of experts stays within their array
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
        *(pltpu.SMEM(plan.buffers[name].shape, plan.buffers[name].dtype) for name in SCALARS),
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


def _kernel(plan: Plan, body: Body, table, token, position, *refs) -> None:
    slots, refs = Slots(*refs[: len(Slots._fields)]), refs[len(Slots._fields) :]
    kinds = (plan.weights, plan.caches, plan.outputs, plan.caches, plan.buffers, plan.exchange_buffers)
    kinds = (*kinds, SCALARS, semaphores(plan))
    weights, _, outputs, caches, buffers, exchanges, scalars, copies, links = _split(refs, tuple(map(len, kinds)))
    rank = lax.axis_index(AXIS)
    core = Core(
        plan,
        rank,
        table,
        token,
        position,
        slots,
        _named(plan.weights, weights),
        _named(plan.caches, caches),
        _named(plan.buffers, buffers),
        _named(SCALARS, scalars),
        _named(semaphores(plan), copies),
    )
    links = Links(plan, rank, _named(plan.exchange_buffers, exchanges), *links)
    body(core, Ring(core), links, _named(plan.outputs, outputs))
