"""Grouped matrix products on a TPU, for the groups' sizes as they come: see visits.py for what depends on them.

Rows are sorted by group and `sizes` add up to R. Sums are float32, products of float32 in full precision, results are
rounded once. Widths are whole lane tiles: see `whole_lanes`. Nothing here has a gradient: these three are each other's.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.kernels import LANES
from pallas_kernels.grouped import pallas


def whole_lanes(*widths: int) -> bool:
    """Whether the kernels take matrices of these widths."""
    return all(width % LANES == 0 for width in widths)


def grouped_matmul(
    x: Float[Array, "R A"], w: Float[Array, "G A C"], sizes: Int[Array, " G"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "R C"]:
    """y[r] = x[r] w[g] for the group g of row r.

    Raises ValueError for widths that are not whole lane tiles, or for an A of which no block of rows is in VMEM.
    """
    _check(x, w)
    return pallas.matmul(pallas.FORWARD, x, w, sizes, dtype)


def grouped_transposed(
    dy: Float[Array, "R C"], w: Float[Array, "G A C"], sizes: Int[Array, " G"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "R A"]:
    """dx[r] = w[g] dy[r]: the gradient of `grouped_matmul` for x. `w` is read as it lies."""
    _check(dy, w)
    return pallas.matmul(pallas.TRANSPOSED, dy, w, sizes, dtype)


def grouped_outer(x: Float[Array, "R A"], dy: Float[Array, "R C"], sizes: Int[Array, " G"]) -> Float[Array, "G A C"]:
    """dw[g] = x_g^T dy_g, in float32: the gradient of `grouped_matmul` for w. A group without rows gets zeros."""
    _check(x, dy)
    return pallas.outer(x, dy, sizes)


def _check(*arrays: Array) -> None:
    for array in arrays:
        if not whole_lanes(*array.shape[1:]):
            raise ValueError(f"shape {array.shape}: expected widths that are multiples of {LANES}")
