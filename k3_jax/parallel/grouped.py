"""Grouped matrix product: rows sorted by group, one matrix per group.

TPUs run the kernels of `pallas_kernels/grouped` where the widths are whole lane tiles. XLA:CPU lowers
`jax.lax.ragged_dot` to a product with every group and a mask, which costs G times the work; there the rows are cut into
blocks that belong to one group each. Everywhere else it is `ragged_dot`. All are exact and drop nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax.sharding import precision
from pallas_kernels import grouped as kernels
from pallas_kernels.common.dispatch import on_tpu, vary_alike

BLOCK = 128


def grouped_matmul(
    x: Float[Array, "R A"], w: Float[Array, "G A C"], sizes: Int[Array, " G"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "R C"]:
    """y[r] = x[r] @ w[g] for the group g of row r; `sizes` sum to R. Summed in float32, then rounded to `dtype`."""
    arrays = vary_alike(x, w, sizes)
    if _by_kernel(*w.shape[1:]):
        return kernels.grouped_matmul(*arrays, dtype)
    return jax.lax.platform_dependent(*arrays, cpu=_blocked, default=_ragged).astype(dtype)


def grouped_transposed(
    dy: Float[Array, "R C"], w: Float[Array, "G A C"], sizes: Int[Array, " G"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "R A"]:
    """dx[r] = w[g] @ dy[r]: the gradient of `grouped_matmul` for x."""
    arrays = vary_alike(dy, w, sizes)
    if _by_kernel(*w.shape[1:]):
        return kernels.grouped_transposed(*arrays, dtype)
    return jax.lax.platform_dependent(*arrays, cpu=_blocked_transposed, default=_ragged_transposed).astype(dtype)


def grouped_outer(x: Float[Array, "R A"], dy: Float[Array, "R C"], sizes: Int[Array, " G"]) -> Float[Array, "G A C"]:
    """dw[g] = x_g^T dy_g: the gradient of `grouped_matmul` for w, in float32."""
    arrays = vary_alike(x, dy, sizes)
    if _by_kernel(x.shape[1], dy.shape[1]):
        return kernels.grouped_outer(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=_blocked_outer, default=_ragged_outer)


def _by_kernel(*widths: int) -> bool:
    return on_tpu() and kernels.whole_lanes(*widths)


def _ragged(x, w, sizes):
    return jax.lax.ragged_dot(x, w, sizes, precision=precision(x.dtype), preferred_element_type=jnp.float32)


def _ragged_transposed(dy, w, sizes):
    return _ragged(dy, jnp.swapaxes(w, 1, 2), sizes)


def _ragged_outer(x, dy, sizes):
    """The ragged axis is the contracted one."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(
        x, dy, sizes, numbers, precision=precision(x.dtype), preferred_element_type=jnp.float32
    )


def _blocks(rows: int, sizes: Int[Array, " G"]) -> tuple[Array, Array, Array]:
    """Rows of each block [N, BLOCK] (R where there is none), its group [N], and each row's slot [R] in the blocks."""
    G = sizes.shape[0]
    N = -(-rows // BLOCK) + G
    ends = jnp.cumsum(sizes)
    blocks = -(-sizes // BLOCK)
    block_ends = jnp.cumsum(blocks)
    row = jnp.arange(rows)
    group = jnp.searchsorted(ends, row, side="right").clip(0, G - 1)
    slot = (block_ends - blocks)[group] * BLOCK + row - (ends - sizes)[group]
    index = jnp.full((N * BLOCK,), rows).at[slot].set(row)
    owner = jnp.searchsorted(block_ends, jnp.arange(N), side="right").clip(0, G - 1)
    return index.reshape(N, BLOCK), owner, slot


def _gather(x, index):
    return x.at[index].get(mode="fill", fill_value=0)


def _blocked(x, w, sizes):
    index, owner, slot = _blocks(x.shape[0], sizes)
    product = partial(jnp.einsum, precision=precision(x.dtype), preferred_element_type=jnp.float32)
    y = product("nba,nac->nbc", _gather(x, index), w[owner])
    return y.reshape(-1, y.shape[-1])[slot]


def _blocked_transposed(dy, w, sizes):
    return _blocked(dy, jnp.swapaxes(w, 1, 2), sizes)


def _blocked_outer(x, dy, sizes):
    index, owner, _ = _blocks(x.shape[0], sizes)
    product = partial(jnp.einsum, precision=precision(x.dtype), preferred_element_type=jnp.float32)
    parts = product("nba,nbc->nac", _gather(x, index), _gather(dy, index))
    return jax.ops.segment_sum(parts, owner, num_segments=sizes.shape[0])
