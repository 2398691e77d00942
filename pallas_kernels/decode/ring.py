"""The ring: tiles of the weight tape on their way through VMEM, and products with the matrices that they hold.

Tile t stands in bank t mod `banks`. When it has been used, tile t + banks is copied into the same bank, whatever layer
that belongs to: the memory is busy across layers and across exchanges. A few tiles are awaited, and let go, together:
no load of weights moves across a wait or the start of a copy, so the fewer there are, the better they are spread.
"""

from dataclasses import dataclass

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.core import F32, Core, joined, pad_lanes, pad_rows
from pallas_kernels.decode.tape import SUBLANES, Block, Part, Piece

DEPTH = 256  # of the matrix unit: rows of weights that it takes at once


@dataclass(frozen=True)
class Ring:
    core: Core

    def copy(self, tile):
        core = self.core
        bank = lax.rem(tile, core.config.blocks.banks)
        target, semaphore = core.buffers.banks.at[bank], core.semaphores.ring.at[bank]
        return pltpu.make_async_copy(core.weights.tape.at[tile], target, semaphore)

    def prime(self) -> None:
        """Start the first tiles of a step."""

        @pl.loop(0, self.core.config.blocks.banks)
        def _(tile):
            self.copy(tile).start()

    def product(self, part: Part, start, name: str, x):
        """x [B, depth] times matrix `name` [depth, width] of a part that begins at tile `start`: [B, width], float32.

        Matrices of a part must be used in their order, each once: products wait for tiles and let them go.
        """
        blocks = part.of(name)
        matrix = blocks[0].matrix
        x = x.astype(self.core.config.dtype)
        if matrix.transposed:
            return self._transposed(blocks, start, x)[: len(x), : matrix.width]
        columns = [self._block(block, start, x) for block in blocks]
        return joined(columns, 1)[:, : matrix.width]

    def _block(self, block: Block, start, x):
        """[B, cols]: `fold` pieces of x as rows, of whose product with the block the diagonal counts."""
        B = len(x)
        lhs = _folded(x, block)
        total = None
        for piece in block.pieces:
            self._await(piece, start)
            for row in range(0, piece.rows, DEPTH):
                rows = slice(row, min(row + DEPTH, piece.rows))
                term = self._dot(lhs[:, piece.start :][:, rows], self._weights(piece, start, rows), 0)
                total = term if total is None else total + term
            self._release(piece, start)
        parts = [total[i * B : (i + 1) * B, i * block.cols : (i + 1) * block.cols] for i in range(block.fold)]
        return sum(parts[1:], parts[0])

    def _transposed(self, blocks: tuple[Block, ...], start, x):
        lhs, total = pad_rows(x, SUBLANES), None
        for block in blocks:
            (piece,) = block.pieces
            columns = lhs[:, block.column : block.column + block.cols]
            self._await(piece, start)
            term = self._dot(columns, self._weights(piece, start, slice(0, piece.rows)), 1)
            self._release(piece, start)
            total = term if total is None else total + term
        return total

    def _dot(self, x, weight, axis: int):
        """Summed over `axis` of the weight."""
        dimensions = (((1,), (axis,)), ((), ()))
        return lax.dot_general(x, weight, dimensions, precision=self.core.config.precision, preferred_element_type=F32)

    def _await(self, piece: Piece, start) -> None:
        for tile in piece.awaited:
            self.copy(start + tile).wait()

    def _weights(self, piece: Piece, start, rows: slice):
        bank = lax.rem(start + piece.tile, self.core.config.blocks.banks)
        return self.core.buffers.banks[bank, piece.row + rows.start : piece.row + rows.stop, :]

    def _release(self, piece: Piece, start) -> None:
        """Only the head's last tiles have no successor, and its start is a number."""
        for tile in piece.freed:
            following = start + tile + self.core.config.blocks.banks
            if not (isinstance(following, int) and following >= self.core.plan.tape.tiles):
                self.copy(following).start()


def _folded(x, block: Block):
    """[fold B, depth] from x [B, K], rows of zeros up to a whole tile."""
    x = pad_lanes(x, block.fold * block.depth)
    parts = [x[:, i * block.depth : (i + 1) * block.depth] for i in range(block.fold)]
    return pad_rows(joined(parts, 0), SUBLANES)
