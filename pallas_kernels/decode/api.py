"""Programs of decode steps over a mesh of ranks.

plan = Plan(config)
run = decode_program(plan, Mesh(devices, (AXIS,)), steps=16)
tokens, logits, caches = run(weights, caches, token, position)
verify = verify_program(plan, mesh)     # one step, also of drafts: rows of one sequence, see slots.py
token, logits, caches = verify(weights, caches, token, position, slots)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from pallas_kernels.decode.call import AXIS
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.slots import Slots, independent
from pallas_kernels.decode.step import decode_step


def decode_program(plan: Plan, mesh: Mesh, steps: int) -> Callable:
    """A compiled function of (weights, caches, token [B], position [B]) that decodes `steps` greedy tokens per row. The
    rows are independent, each in the slot of its number.

    Arrays of ranks lead with an axis [ranks, ...] on the mesh's only axis, `AXIS`; caches are donated. `token` stands
    at `position`; a row with a negative position is idle and changes nothing. Returns tokens [steps, B], the last
    step's logits [B, vocab] cut over the ranks, and the caches.
    """
    slots = independent(plan.config.rows)

    def local(weights: dict, caches: dict, token: Int[Array, " B"], position: Int[Array, " B"]):
        def one(i, carry):
            token, position, tokens, _, caches = carry
            out, caches = decode_step(plan, token, position, slots, weights, caches)
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
        return tokens, logits, caches

    return _program(local, mesh, of_rows=2)


def verify_program(plan: Plan, mesh: Mesh) -> Callable:
    """A compiled function of (weights, caches, token [B], position [B], slots): one step of rows that stand where
    `slots.together` says. Returns the greedy tokens [B] after each row, logits and caches as `decode_program`.

    XLA copies the caches at both ends of every call.
    """

    def local(weights: dict, caches: dict, token: Int[Array, " B"], position: Int[Array, " B"], slots: Slots):
        out, caches = decode_step(plan, token, position, slots, weights, caches)
        return out["token"][:, 0], out["logits"], caches

    return _program(local, mesh, of_rows=3)


def _program(local: Callable, mesh: Mesh, of_rows: int) -> Callable:
    """A step's function on one rank over all of them: of weights, caches and so many arguments that all ranks have."""
    ranks, alike, columns = PartitionSpec(AXIS), PartitionSpec(), PartitionSpec(None, AXIS)

    def on_rank(weights: dict, caches: dict, *rows):
        weights, caches = ({name: x[0] for name, x in group.items()} for group in (weights, caches))
        tokens, logits, caches = local(weights, caches, *rows)
        return tokens, logits, {name: x[None] for name, x in caches.items()}

    program = jax.shard_map(
        on_rank,
        mesh=mesh,
        in_specs=(ranks, ranks, *[alike] * of_rows),
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
