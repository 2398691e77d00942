"""What kernels are written with: products, outputs, and the order in which their parts stand in the program."""

import math
from collections.abc import Generator, Iterable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

LANES = 128
LOG2E = math.log2(math.e)
ROWS_BY_COLUMNS, ROWS_BY_ROWS, COLUMNS_BY_ROWS = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


def dot(a, b, contract=ROWS_BY_COLUMNS) -> Float[Array, "_ _"]:
    """A product with float32 sums, and of float32 operands in full precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def in_turns(programs: Iterable[Generator], stride: int = 0) -> None:
    """Run generators in turns, so that their instructions stand side by side in the kernel's program: all from the
    first turn on, or each `stride` turns after the one before."""
    programs, running, started, turn, done = list(programs), [], 0, 0, object()
    while started < len(programs) or running:
        while started < len(programs) and started * stride <= turn:
            running.append(programs[started])
            started += 1
        running = [program for program in running if next(program, done) is not done]
        turn += 1


def shape_of(shape, dtype, like: jax.Array) -> jax.ShapeDtypeStruct:
    """An output that varies over the mesh axes over which `like` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def cost_of(flops: int, arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> pl.CostEstimate:
    """Of a kernel that reads or writes `arrays`. Without it XLA takes the kernel for instantaneous, and sends nothing
    while it runs."""
    size = sum(x.size * x.dtype.itemsize for x in arrays)
    return pl.CostEstimate(flops=flops, bytes_accessed=size, transcendentals=0)
