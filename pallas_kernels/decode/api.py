"""Programs of decode steps over a mesh of ranks.

plan = Plan(config)
run = decode_program(plan, Mesh(devices, (AXIS,)), steps=16)
tokens, logits, caches = run(weights, caches, token, position)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pallas_kernels.decode.call import AXIS
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.step import decode_step


def decode_program(plan: Plan, mesh: Mesh, steps: int) -> Callable:
    """A compiled function of (weights, caches, token [B], position [B]) that decodes `steps` greedy tokens per row.

    Arrays of ranks lead with an axis [ranks, ...] on the mesh's only axis, `AXIS`; caches are donated. `token` stands
    at `position`; a row with a negative position is idle, its caches stay. Returns tokens [steps, B], the last step's
    logits [B, vocab] cut over the ranks, and the caches.
    """
    ranks, alike, columns = PartitionSpec(AXIS), PartitionSpec(), PartitionSpec(None, AXIS)

    def local(weights: dict, caches: dict, token: Int[Array, " B"], position: Int[Array, " B"]):
        weights, caches = ({name: x[0] for name, x in group.items()} for group in (weights, caches))

        def one(i, carry):
            token, position, tokens, _, caches = carry
            out, caches = decode_step(plan, token, position, weights, caches)
            token = out["token"][:, 0]
            return (
                token,
                jnp.where(position < 0, position, position + 1),
                tokens.at[i].set(token),
                out["logits"],
                caches,
            )

        tokens = jnp.zeros((steps, plan.config.rows), jnp.int32)
        logits = jnp.zeros(plan.outputs["logits"].shape, jnp.float32)
        *_, tokens, logits, caches = jax.lax.fori_loop(0, steps, one, (token, position, tokens, logits, caches))
        return tokens, logits, {name: x[None] for name, x in caches.items()}

    program = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(ranks, ranks, alike, alike),
        out_specs=(alike, columns, ranks),
        check_vma=False,  # the interpreter's effects are not typed
    )
    return jax.jit(program, donate_argnums=1)


def abstract_arguments(plan: Plan, mesh: Mesh) -> tuple:
    """What `decode_program` takes, without data: to lower and compile it ahead of time."""

    def of(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        return jax.ShapeDtypeStruct((plan.config.ranks, *array.shape), array.dtype, sharding=sharding)

    rows = jax.ShapeDtypeStruct((plan.config.rows,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    weights, caches = ({name: of(x) for name, x in group.items()} for group in (plan.weights, plan.caches))
    return weights, caches, rows, rows
