"""Rows of the AttnRes bank on the ranks of a pipeline: a pool of slots, and the messages between neighbours.

Inside jax.shard_map over the axis `pipe`. Which slot holds what is decided by `schedule`; a slot index equal to the
pool's size less one is nobody's: what is written there is not read as a row.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax import sharding
from k3_jax.parallel.schedule import Schedule

AXIS = "pipe"
Rows = Float[Array, "_ B T D"]


def zeros(count: int, dtype: DTypeLike, like: Float[Array, "B T D"] | jax.ShapeDtypeStruct) -> Rows:
    return sharding.place(jnp.zeros((count, *like.shape), dtype), sharding.active("_BTD"))


def read(pool: Rows, slots: Int[Array, " n"]) -> Rows:
    return jnp.stack([row_of(pool, slots[i]) for i in range(slots.shape[0])])


def write(pool: Rows, slots: Int[Array, " n"], rows: Rows | list) -> Rows:
    for i in range(slots.shape[0]):
        pool = jax.lax.dynamic_update_index_in_dim(pool, rows[i].astype(pool.dtype), slots[i], 0)
    return pool


def add(pool: Rows, slots: Int[Array, " n"], rows: Rows) -> Rows:
    """What is added to nobody's slot is lost."""
    live = (slots < pool.shape[0] - 1)[:, None, None, None]
    return write(pool, slots, read(pool, slots) + jnp.where(live, rows, 0))


def row_of(rows: Rows, i: Int[Array, ""]) -> Float[Array, "B T D"]:
    return jax.lax.dynamic_index_in_dim(rows, i, 0, keepdims=False)


def newest(bank: Rows, r: Float[Array, "B T D"], row: Int[Array, ""], count: int) -> Rows:
    """r, which is to be the bank's `row`, and the count - 1 rows before it, the newest first."""
    return jnp.stack([r, *(row_of(bank, jnp.maximum(row - i, 0)) for i in range(1, count))])


def in_place(message: Rows, row: Int[Array, ""], num_rows: int) -> Rows:
    """The rows of a message in their places in a bank; its first is the bank's `row`. Others are zero."""
    back = row - jnp.arange(num_rows)
    inside = (back >= 0) & (back < message.shape[0])
    rows = read(message, jnp.clip(back, 0, message.shape[0] - 1))
    return jnp.where(inside[:, None, None, None], rows, 0)


def send_on(message: Rows, schedule: Schedule) -> Rows:
    """To the rank of the next stage; each row over the links where it is fresh. Zeros where nothing comes."""
    rows = [jax.lax.ppermute(row, AXIS, schedule.links(i)) for i, row in enumerate(message)]
    return jnp.stack(rows)


def send_back(message: Rows, schedule: Schedule) -> Rows:
    """The way back of `send_on`."""
    links = [[(b, a) for a, b in schedule.links(i)] for i in range(message.shape[0])]
    return jnp.stack([jax.lax.ppermute(row, AXIS, pairs) for row, pairs in zip(message, links, strict=True)])
