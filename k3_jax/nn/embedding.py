"""Token embedding from a table that stays where it is stored: rows of the vocabulary over `tensor`, width over `fsdp`
and the axes of positions.

Tokens travel to the table and not the table, 4.7 GB in float32 at full size, to the tokens. Its width is not cut over
`expert` as other weights are: every rank would look up everybody's tokens, a few numbers each.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax import sharding


def embed(table: Float[Array, "O D"], tokens: Int[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
    """table[tokens] in `dtype`; gradients are added up in the table's own."""
    look_up = sharding.local(partial(_look_up, dtype=dtype), (sharding.stored("OL"), "BT"), "BTD")
    return look_up(table, tokens)


def _look_up(table: Float[Array, "O d"], tokens: Int[Array, "b T"], dtype: DTypeLike) -> Float[Array, "b T D"]:
    """Each rank finds its d of the D numbers for the tokens of all ranks that share the width, then they exchange."""
    if not sharding.has_mesh():
        return table[tokens].astype(dtype)
    ranks = sharding.stored("L")[0]
    tokens = jax.lax.all_gather(tokens, ranks, tiled=True)
    local = tokens - table.shape[0] * jax.lax.axis_index("tensor")
    mine = (local >= 0) & (local < table.shape[0])
    rows = jnp.where(mine[..., None], table[jnp.where(mine, local, 0)].astype(dtype), 0)
    rows = sharding.sum_over("O", rows)
    return jax.lax.all_to_all(rows, ranks, split_axis=0, concat_axis=2, tiled=True)
