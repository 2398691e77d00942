"""The weight tape: the dense matrices of one rank, in the order in which a step uses them, as equal tiles.

A tile is [tile_rows, tile_cols]. A matrix [K, N] becomes column blocks tile_cols wide and K rows high. What
is left of its columns is folded, so that little is padding: a block `cols` wide is cut into `fold` = tile_cols / cols
pieces of K / fold rows, which stand side by side; its product takes the pieces of x as rows and adds up the diagonal.
A few rows [N, K] that multiply x from the other side (router, MLA's way down) stand transposed: chunks of tile_cols
columns, one below the other.

The parts of a layer (mixer, channels) begin with a new tile, hence one schedule serves all layers of a kind.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from pallas_kernels.decode.config import LANES, DecodeConfig, LayerKind, round_up

SUBLANES = 16  # of a bfloat16 tile


@dataclass(frozen=True)
class Matrix:
    """`depth` is summed over, `width` comes out. Its columns may be of several named parts."""

    name: str
    depth: int
    width: int
    transposed: bool = False


@dataclass(frozen=True)
class Piece:
    """Rows of one tile that one product uses, and where in the block's own rows they begin.

    `awaited`: tiles to wait for before, `freed`: tiles that may be refilled afterwards.
    """

    tile: int
    row: int
    rows: int
    start: int
    awaited: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """Columns [column, column + cols) of a matrix in `fold` parts side by side, each of `depth` rows.

    Of a transposed matrix: all its rows, and of its columns tile_cols from `column` on.
    """

    matrix: Matrix
    column: int
    cols: int
    fold: int
    depth: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Part:
    """Matrices that are used one after the other, in tiles of their own."""

    blocks: tuple[Block, ...]
    tiles: int

    def of(self, name: str) -> tuple[Block, ...]:
        found = tuple(block for block in self.blocks if block.matrix.name == name)
        if not found:
            raise KeyError(name)
        return found


def block_depth(depth: int, fold: int) -> int:
    """Rows of a block: whole lane tiles of x if there are several, so that x is never cut inside of one."""
    rows = -(-depth // fold)
    if rows > LANES:
        return round_up(rows, LANES)
    return next(size for size in (16, 32, 64, 128) if size >= rows)


def _shapes(matrix: Matrix, tile_cols: int) -> list[tuple[int, int, int, int]]:
    """(column, cols, fold, depth) of the blocks of a matrix."""
    if matrix.transposed:
        rows = round_up(matrix.width, SUBLANES)
        return [(column, tile_cols, 1, rows) for column in range(0, matrix.depth, tile_cols)]
    shapes, column, cols = [], 0, tile_cols
    left = round_up(matrix.width, LANES)
    while left:
        while cols > left:
            cols //= 2
        fold = tile_cols // cols
        shapes.append((column, cols, fold, block_depth(matrix.depth, fold)))
        column, left = column + cols, left - cols
    return shapes


def layout(matrices: tuple[Matrix, ...], tile_rows: int, tile_cols: int, together: int) -> Part:
    """Where every block of these matrices stands. A matrix begins at whole lane tiles, blocks follow without gaps; the
    rows of a transposed block stay in one tile. So many tiles are awaited and freed `together`."""
    blocks, cursor = [], 0
    for matrix in matrices:
        cursor = round_up(cursor, LANES)
        for column, cols, fold, depth in _shapes(matrix, tile_cols):
            if matrix.transposed and cursor // tile_rows != (cursor + depth - 1) // tile_rows:
                cursor = round_up(cursor, tile_rows)
            blocks.append((matrix, column, cols, fold, depth, tuple(_cut(cursor, depth, tile_rows))))
            cursor += depth
    tiles = -(-cursor // tile_rows)
    return Part(tuple(_in_groups(blocks, tiles, together)), tiles)


def _cut(cursor: int, depth: int, tile_rows: int):
    start = 0
    while start < depth:
        tile, row = divmod(cursor + start, tile_rows)
        rows = min(depth - start, tile_rows - row)
        yield Piece(tile, row, rows, start)
        start += rows


def _in_groups(blocks, tiles: int, together: int) -> Iterator[Block]:
    """With the tiles that the first use of each group awaits, and the last one frees."""
    order = [(p.tile // together, i, j) for i, block in enumerate(blocks) for j, p in enumerate(block[-1])]
    last = {group: (i, j) for group, i, j in order}
    first = {group: (i, j) for group, i, j in reversed(order)}
    for i, (*head, pieces) in enumerate(blocks):
        marked = []
        for j, piece in enumerate(pieces):
            group = piece.tile // together
            members = tuple(range(group * together, min((group + 1) * together, tiles)))
            of = lambda uses: members if uses[group] == (i, j) else ()  # noqa: B023, E731
            marked.append(replace(piece, awaited=of(first), freed=of(last)))
        yield Block(*head, tuple(marked))


def kda_matrices(config: DecodeConfig) -> tuple[Matrix, ...]:
    """Columns of `project`: q, k, v, g of this rank's heads, then the whole way down of the decay gate."""
    D, K = config.hidden, config.kda.head_dim
    h = config.share(config.kda.heads)
    return (
        Matrix("project", D, 4 * h * K + K),
        Matrix("beta", D, h, transposed=True),
        Matrix("decay", K, h * K),
        Matrix("output", h * K, D),
    )


def mla_matrices(config: DecodeConfig) -> tuple[Matrix, ...]:
    """`down` holds this rank's rows of the ways down of queries and latents; `query` all heads' nope, then all pe."""
    D, s = config.hidden, config.mla
    h = config.share(s.heads)
    return (
        Matrix("down", D, config.share(s.q_rank) + config.share(s.kv_rank + s.pe), transposed=True),
        Matrix("gate", D, h * s.v),
        Matrix("query", s.q_rank, h * (s.nope + s.pe)),
        *(Matrix(f"absorb_{i}", s.nope, s.kv_rank) for i in range(h)),
        *(Matrix(f"value_{i}", s.kv_rank, s.v) for i in range(h)),
        Matrix("output", h * s.v, D),
    )


def dense_matrices(config: DecodeConfig) -> tuple[Matrix, ...]:
    """Gate and up each in whole lane tiles."""
    F = config.share(config.dense)
    return Matrix("hidden", config.hidden, 2 * round_up(F, LANES)), Matrix("output", F, config.hidden)


def moe_matrices(config: DecodeConfig) -> tuple[Matrix, ...]:
    """Columns of `shared_in`: gate and up of the shared experts."""
    D, s = config.hidden, config.moe
    return (
        Matrix("router", D, config.share(s.experts), transposed=True),
        Matrix("down", D, config.columns(s.latent)),
        Matrix("shared_in", D, 2 * config.share(s.shared)),
        Matrix("shared_out", s.shared, config.columns(D)),
        Matrix("up", s.latent, config.columns(D)),
    )


@dataclass(frozen=True)
class Tape:
    """The schedule of the whole step: which part every layer uses, and where on the tape it begins."""

    config: DecodeConfig

    def _layout(self, matrices: tuple[Matrix, ...]) -> Part:
        blocks = self.config.blocks
        return layout(matrices, blocks.tile_rows, blocks.tile_cols, blocks.together)

    @cached_property
    def kda(self) -> Part:
        return self._layout(kda_matrices(self.config))

    @cached_property
    def mla(self) -> Part:
        return self._layout(mla_matrices(self.config))

    @cached_property
    def dense(self) -> Part:
        return self._layout(dense_matrices(self.config))

    @cached_property
    def moe(self) -> Part:
        return self._layout(moe_matrices(self.config))

    @cached_property
    def head(self) -> Part:
        config = self.config
        return self._layout((Matrix("head", config.hidden, config.share(config.vocab)),))

    def parts(self, kind: LayerKind) -> tuple[Part, Part]:
        return (self.mla if kind.mla else self.kda), (self.moe if kind.moe else self.dense)

    @cached_property
    def starts(self) -> tuple[tuple[int, int], ...]:
        """Per layer the first tile of its mixer and of its channels."""
        starts, tile = [], 0
        for kind in self.config.layers:
            mixer, channels = self.parts(kind)
            starts.append((tile, tile + mixer.tiles))
            tile += mixer.tiles + channels.tiles
        return tuple(starts)

    @cached_property
    def head_start(self) -> int:
        mixer, channels = self.parts(self.config.layers[-1])
        return self.starts[-1][1] + channels.tiles

    @property
    def tiles(self) -> int:
        return self.head_start + self.head.tiles

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.tiles, self.config.blocks.tile_rows, self.config.blocks.tile_cols
