"""The weight tape: whatever the shapes, its blocks hold every weight once, and its tiles come and go in order."""

import numpy as np
import pytest

from k3_jax.recipe import load_recipe
from k3_jax.serve.pack import decode_config
from pallas_kernels.decode import Plan
from pallas_kernels.decode.pack import PackError, fill
from pallas_kernels.decode.tape import LANES, Matrix, layout
from tests.decode.model import kernel_config, model_config

TILE_ROWS, TILE_COLS = 256, 512
SHAPES = {
    "whole-tiles": (512, 1024),
    "half-and-quarter": (1024, 896),
    "narrow": (512, 128),
    "padded-columns": (768, 224),
    "odd-depth": (1056, 512),
    "shallow": (64, 192),
    "several-shallow-blocks": (64, 1536),
}


def product(part, tape, name, x):
    """x [depth] times a matrix that stands on a tape, by the blocks' own description."""
    blocks = part.of(name)
    matrix = blocks[0].matrix
    out = np.zeros(max(block.column + block.cols for block in blocks) if not matrix.transposed else blocks[0].depth)
    for block in blocks:
        rows = np.concatenate([tape[p.tile, p.row : p.row + p.rows] for p in block.pieces])
        if matrix.transposed:
            out += rows @ np.pad(x, (0, TILE_COLS))[block.column : block.column + TILE_COLS]
            continue
        padded = np.pad(x, (0, block.fold * block.depth))
        for i in range(block.fold):
            columns = rows[:, i * block.cols : (i + 1) * block.cols]
            out[block.column : block.column + block.cols] += padded[i * block.depth : (i + 1) * block.depth] @ columns
    return out[: matrix.width]


def matrices():
    made = [Matrix(name, *shape) for name, shape in SHAPES.items()]
    return (*made[:3], Matrix("rows", 2048, 28, transposed=True), *made[3:], Matrix("few", 1024, 3, transposed=True))


@pytest.fixture(scope="module")
def example():
    rng = np.random.default_rng(0)
    part = layout(matrices(), TILE_ROWS, TILE_COLS, together=1)
    values = {m.name: rng.integers(-3, 4, (m.depth, m.width)).astype(np.float64) for m in matrices()}
    return part, values, fill(part, values, TILE_ROWS, TILE_COLS, np.float32).astype(np.float64)


@pytest.mark.parametrize("matrix", matrices(), ids=lambda matrix: matrix.name)
def test_products_from_the_tape(example, matrix):
    part, values, tape = example
    x = np.random.default_rng(1).integers(-3, 4, matrix.depth).astype(np.float64)
    np.testing.assert_array_equal(product(part, tape, matrix.name, x), x @ values[matrix.name])


def test_every_weight_stands_once(example):
    _, values, tape = example
    assert np.abs(tape).sum() == sum(np.abs(x).sum() for x in values.values())


def parts() -> list:
    small, full = (
        Plan(kernel_config(model_config())).tape,
        Plan(decode_config(load_recipe("configs/k3.py").model, ranks=32, rows=1, capacity=2048)).tape,
    )
    params = []
    for size, tape in (("tiny", small), ("k3", full)):
        for name in ("kda", "mla", "dense", "moe", "head"):
            params.append(pytest.param(getattr(tape, name), tape.config.blocks.tile_rows, id=f"{size}-{name}"))
    return [
        *params,
        *(pytest.param(layout(matrices(), TILE_ROWS, TILE_COLS, n), TILE_ROWS, id=f"shapes-{n}") for n in (1, 3)),
    ]


@pytest.mark.parametrize(("part", "tile_rows"), parts())
def test_tiles_come_and_go_in_order(part, tile_rows):
    """A tile is waited for once, before its rows are used, and let go once, after them; tiles are never left unused."""
    pieces = [piece for block in part.blocks for piece in block.pieces]
    assert [tile for p in pieces for tile in p.awaited] == list(range(part.tiles))
    assert [tile for p in pieces for tile in p.freed] == list(range(part.tiles))
    held, end = set(), (0, 0)
    for p in pieces:
        held |= {*p.awaited}
        assert p.tile in held
        assert (p.tile, p.row) >= end and p.row + p.rows <= tile_rows
        assert p.row % 16 == 0 and (p.start % LANES == 0 or p.rows < LANES)
        end = (p.tile, p.row + p.rows)
        held -= {*p.freed}
    assert not held


def test_layers_follow_each_other():
    tape = Plan(kernel_config(model_config())).tape
    ends = []
    for kind, (mixer, channels) in zip(tape.config.layers, tape.starts, strict=True):
        first, second = tape.parts(kind)
        assert mixer == (ends[-1] if ends else 0) and channels == mixer + first.tiles
        ends.append(channels + second.tiles)
    assert tape.head_start == ends[-1] and tape.tiles == ends[-1] + tape.head.tiles


def test_weights_of_another_type_are_refused():
    part = layout((Matrix("w", 128, 128),), 128, 128, together=1)
    with pytest.raises(PackError, match="w holds values that bfloat16 has not"):
        fill(part, {"w": np.full((128, 128), 1.001)}, 128, 128, "bfloat16")
