"""The mathematics of one chunk of one head on a TPU core: decays, the products of rows, the triangular inverse.

With S the state at the chunk's entry and D_ij = exp(sum of g over j < m <= i), per key channel:

    L_ij = beta_i <k_i, D_ij k_j>  (i > j)          P_ij = <q_i, D_ij k_j>  (i >= j)
    (I + L) U = beta (v - K_in S)                   o = Q_in S + P U             S' = Diag(decay) S + K_out^T U

Q_in, K_in are decayed from the chunk's entry, K_out to its end. All exponents are in base 2. Operands of products are
rounded to `dtype`, the type of the inputs; sums are float32. Functions that are generators yield where the instructions
of another head should go in between.
"""

from collections.abc import Callable, Generator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from pallas_kernels.common.kernels import COLUMNS_BY_ROWS, LOG2E, ROWS_BY_ROWS, dot
from pallas_kernels.kda.gate import GATE_FLOOR
from pallas_kernels.kda.steps import CHUNK

TILE = 16


def iota(axis: int, shape: tuple[int, int] = (CHUNK, CHUNK)) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def tile(x, n: int):
    return x[n * TILE : (n + 1) * TILE]


class Products(NamedTuple):
    """What a chunk needs of q, k and g. P and L are without scale, beta and causal mask."""

    P: Float[Array, "C C"]  # float32
    L: Float[Array, "C C"]  # float32
    q_in: Float[Array, "C K"]
    k_in: Float[Array, "C K"]
    k_out: Float[Array, "C K"]
    decay: Float[Array, "1 K"]  # float32


class Cotangents(NamedTuple):
    """Of `Products`, float32. dP and dL are strictly lower: a row's product with itself has no decay."""

    P: Float[Array, "C C"]
    L: Float[Array, "C C"]
    q_in: Float[Array, "C K"]
    k_in: Float[Array, "C K"]
    k_out: Float[Array, "C K"]


class Gradients(NamedTuple):
    """Of q and k, float32; k's apart as a row (decayed from before), as a column (decayed to later rows), as K_out."""

    q: Float[Array, "C K"]
    k_row: Float[Array, "C K"]
    k_column: Float[Array, "C K"]
    k_out: Float[Array, "C K"]


Pullback = Callable[[Cotangents], Generator[None, None, Gradients]]


def running_sum(where: Bool[Array, "C C"], g: Float[Array, "C K"], dtype: DTypeLike) -> Float[Array, "C K"]:
    """sum_j where_ij g_j, on the matrix unit. In bfloat16 g is the sum of two parts: 2^-17 of every term is lost."""
    return running_sums([where], [g], dtype)


def running_sums(
    where: list[Bool[Array, "C C"]], x: list[Float[Array, "C K"]], dtype: DTypeLike
) -> Float[Array, "C K"]:
    """The sum of several running sums, in one product."""
    if dtype != jnp.float32:
        high = [part.astype(dtype) for part in x]
        x = high + [(part - h.astype(jnp.float32)).astype(dtype) for part, h in zip(x, high, strict=True)]
    ones = [part.astype(jnp.float32).astype(dtype) for part in where] * (len(x) // len(where))
    return dot(jnp.concatenate(ones, axis=1), jnp.concatenate(x))


def products_bounded(
    q: Float[Array, "C K"], k: Float[Array, "C K"], g: Float[Array, "C K"], bound: float, dtype: DTypeLike
) -> Generator[None, None, tuple[Products, Pullback]]:
    """Where g >= bound (here in base 2): 16-row tiles, in which D factors into rows and columns.

    A tile's rows and columns are decayed to its first row, never to one that is later than an output. For later tiles
    its columns decay to the next tile's first row and on from tile to tile, so only the tile's own reach
    2^(15 |bound|). A power of two moves rows and columns to either side of 1. What the factors make of pairs i < j may
    overflow; the causal mask selects it away.
    """
    row, column = iota(0), iota(1)
    within = (row // TILE == column // TILE) & (column <= row) & (column % TILE != 0)
    yield
    centre = round(-bound * (TILE - 1) / 2)
    to_first = running_sum(within, g, dtype) + centre
    yield
    rise, fall = jnp.exp2(to_first), jnp.exp2(-to_first)
    q_rows, k_rows, columns = q * rise, k * rise, k * fall
    tiles = range(CHUNK // TILE)
    start = [g[:1]]  # from the chunk's entry to each tile's first row, inclusive
    for n in tiles[1:]:
        start.append(start[-1] + to_first[n * TILE - 1 : n * TILE] - centre + g[n * TILE : n * TILE + 1])
    total = start[-1] + to_first[-1:] - centre
    leave = [jnp.exp2(start[n + 1] - start[n] - tile(to_first, n)) for n in tiles[:-1]]
    yield
    own, rows = columns.astype(dtype), [x.astype(dtype) for x in (q_rows, k_rows)]
    lefts, rights, P, L, earlier = [], [], [], [], []
    for n in tiles:
        if n:
            step = jnp.exp2(start[n] - start[n - 1])
            earlier = [*(x * step for x in earlier), tile(k, n - 1) * leave[n - 1]]
        lefts.append(jnp.concatenate([tile(x, n) for x in rows]))
        rights.append(jnp.concatenate([*(x.astype(dtype) for x in earlier), own[n * TILE :]]))
        both = dot(lefts[n], rights[n], ROWS_BY_ROWS)
        P.append(both[:TILE])
        L.append(both[TILE:])

    def decayed(x, exponents):
        return jnp.concatenate([tile(x, n) * jnp.exp2(exponents[n]) for n in tiles])

    entry, end = [x - centre for x in start], [total - x + centre for x in start]

    def pullback(d: Cotangents) -> Generator[None, None, Gradients]:
        of_rows = ([], [])
        own, left = [], [0.0 for _ in leave]
        for n in tiles:
            both = jnp.concatenate([tile(d.P, n), tile(d.L, n)]).astype(dtype)
            by_row = dot(both, rights[n])
            by_column = dot(both, lefts[n], COLUMNS_BY_ROWS)
            of_rows[0].append(by_row[:TILE])
            of_rows[1].append(by_row[TILE:])
            own.append(tile(by_column, n))
            for j in range(n):
                left[j] = left[j] + tile(by_column, j) * jnp.exp2(start[n] - start[j + 1])
        yield
        dq, dk = (
            rise * (jnp.concatenate(x) + decayed(state, entry))
            for x, state in zip(of_rows, (d.q_in, d.k_in), strict=True)
        )
        earlier = jnp.concatenate([*(x * y for x, y in zip(left, leave, strict=True)), jnp.zeros_like(own[-1])])
        return Gradients(dq, dk, fall * jnp.concatenate(own) + earlier, fall * decayed(d.k_out, end))

    yield
    products = Products(
        jnp.concatenate(P), jnp.concatenate(L), *(decayed(x, entry).astype(dtype) for x in (q_rows, k_rows)),
        decayed(columns, end).astype(dtype), jnp.exp2(total),
    )  # fmt: skip
    return products, pullback


def products_any(
    q: Float[Array, "C K"], k: Float[Array, "C K"], g: Float[Array, "C K"], dtype: DTypeLike
) -> Generator[None, None, tuple[Products, Pullback]]:
    """For any g <= 0, by recursive halving into blocks of 32, 16, ... 1 rows: every exponent is <= 0.

    At each level the rows of a block's second half and the columns of its first half are decayed to the boundary
    between them; their product is kept for the pairs of rows that this level separates.
    """
    row, column = iota(0), iota(1)
    g = jnp.maximum(g, GATE_FLOOR * LOG2E)
    sizes = [1 << i for i in reversed(range(CHUNK.bit_length() - 1))]
    factors, here = [], []
    for size in sizes:
        second, block = row // size % 2 == 1, row // size == column // size
        run = (second & block & (column <= row)) | (~second & block & (column > row))
        factors.append(jnp.exp2(running_sum(run, g, dtype)))
        here.append(second & (row // size == column // size + 1))
        yield
    P = jnp.where(row == column, dot(q.astype(dtype), k.astype(dtype), ROWS_BY_ROWS), 0.0)
    L = jnp.zeros_like(P)
    rows = [jnp.concatenate([q * factor, k * factor]).astype(dtype) for factor in factors]
    for x, pairs in zip(rows, here, strict=True):
        both = dot(x, x[CHUNK:], ROWS_BY_ROWS)
        P, L = jnp.where(pairs, both[:CHUNK], P), jnp.where(pairs, both[CHUNK:], L)
        yield
    rise, to_end = (jnp.exp2(running_sum(run, g, dtype)) for run in (column <= row, column > row))

    def pullback(d: Cotangents) -> Generator[None, None, Gradients]:
        dq, dk_row, dk_column = rise * d.q_in, rise * d.k_in, 0.0
        for x, factor, pairs in zip(rows, factors, here, strict=True):
            both = jnp.concatenate([jnp.where(pairs, d.P, 0.0), jnp.where(pairs, d.L, 0.0)]).astype(dtype)
            by_row, by_column = dot(both, x[CHUNK:]), dot(both, x, COLUMNS_BY_ROWS)
            yield
            dq, dk_row = dq + factor * by_row[:CHUNK], dk_row + factor * by_row[CHUNK:]
            dk_column = dk_column + factor * by_column
        return Gradients(dq, dk_row, dk_column, to_end * d.k_out)

    yield
    products = Products(P, L, *((x * rise).astype(dtype) for x in (q, k)), (k * to_end).astype(dtype), rise[-1:])
    return products, pullback


def diagonal_tiles(L: Float[Array, "C C"]) -> Float[Array, "S C"]:
    """The 16 x 16 tiles on the diagonal side by side: a selection, since tile n already stands in its lanes."""
    lane = iota(1, (TILE, CHUNK)) // TILE
    x = tile(L, 0)
    for n in range(1, CHUNK // TILE):
        x = jnp.where(lane == n, tile(L, n), x)
    return x


def invert_tiles(L: Float[Array, "S N"]) -> Generator[None, None, Float[Array, "S N"]]:
    """(I + L)^{-1} of tiles side by side, by row substitution in float32: row j is eliminated from the rows below.

    Never by powers of L, which grow like |L|^n while the inverse stays of order one.
    """
    lane = iota(1, L.shape)
    A = jnp.where(lane % TILE == iota(0, L.shape), 1.0, 0.0)
    for j in range(TILE - 1):
        column = jnp.take_along_axis(L, lane // TILE * TILE + j, axis=1)
        A = A - column * A[j : j + 1]
        if j % 5 == 4:
            yield
    return A


def combine_inverses(
    tiles: list[Float[Array, "S C"]], L: list[Float[Array, "C C"]], dtype: DTypeLike
) -> Generator[None, None, list[Float[Array, "C C"]]]:
    """(I + L)^{-1} from the inverses of its diagonal tiles: A_21 = -A_2 L_21 A_1 for pairs of 16, then of 32 rows."""
    lane, row, column = iota(1, (TILE, CHUNK)) // TILE, iota(0), iota(1)
    A = [jnp.concatenate([jnp.where(lane == n, x, 0.0) for n in range(CHUNK // TILE)]) for x in tiles]
    for size in (TILE, 2 * TILE):
        between = (row // size == column // size + 1) & (row // size % 2 == 1)
        rounded = [x.astype(dtype) for x in A]
        left = [dot(a, jnp.where(between, x, jnp.zeros_like(x))).astype(dtype) for a, x in zip(rounded, L, strict=True)]
        yield
        A = [a - dot(x, r) for a, x, r in zip(A, left, rounded, strict=True)]
        yield
    return A
