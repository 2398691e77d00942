"""The published megakernel for K3 on 16 TPU7x chips (Inferact/tpu-megakernels), as far as its sources say, for the same
model of time as ours: its layout, its exchanges, its bytes. Its arithmetic we cannot compile; two constants, fitted to
its throughput at batch 1 and 8, stand for it.

Per rank, 32 of them: attention, shared experts and vocabulary cut by 32, routed experts by 8 groups of 4 ranks, q_a and
kv_a on every rank, gate and up of experts in FP8, down in MXFP4, the rest bfloat16. One pool of VMEM holds either the
attention's weights or expert slots, so the next layer's are requested when the experts are done.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pallas_kernels.decode.timeline import Compute, Fetch, Instruction, Rates, Send, Wait, play

TOKENS_PER_SECOND = {1: 249.0, 2: 392.0, 4: 515.0, 8: 865.0}
SPECULATIVE = {"acceptance": 6, "tokens_per_second": 709.0}
ROOFLINE = 856.0
CONTEXT = 1152  # up to which it was measured; its cache, 0.3 % of the bytes, is in the fitted constants
FITTED, HELD_OUT = (1, 8), (2, 4)

LAYERS, MLA_LAYERS = 93, (*range(3, 92, 4), 92)
EXPERTS, TOP_K, GROUPS, SLOTS = 896, 16, 8, 4
D = 7168
BF16 = 2
KDA = BF16 * (D * 128 + 128 * 384 + D * 1664 + 768 * 3584)
MLA = BF16 * (D * 1536 + D * 640 + 1536 * 768 + 512 * 768 + D * 384 + 768 * 3584)
ROUTER, LATENT_DOWN, LATENT_UP = BF16 * D * 512, BF16 * D * 128, BF16 * 3584 * 1024
SHARED, DENSE, HEAD = BF16 * (D * 384 + 192 * D), BF16 * (D * 2304 + 1152 * D), BF16 * D * 5120
EXPERT = 3584 * 1536 + BF16 * 14 * 1536 + 4 * 96 * 3584 + 24 * 3584
KDA_STATE = 4 * 3 * 128 * 128  # of a row, read and written
STAGES = 4  # of a layer, among which fixed arithmetic is spread


@dataclass(frozen=True)
class Arithmetic:
    """Seconds per layer that are not copies or exchanges: fixed, and for every row."""

    layer: float
    row: float


def busiest(rows: int, groups: int, draws: int = 4000) -> tuple[float, float]:
    """Mean over draws of uniform routing: experts that the fullest of the groups must read for so many rows, and the
    mean over groups. Experts stand in the groups in equal parts; an expert that several rows choose is read once."""
    rng = np.random.default_rng(0)
    chosen = np.zeros((draws, EXPERTS), bool)
    for _ in range(rows):
        np.put_along_axis(chosen, np.argpartition(rng.random((draws, EXPERTS)), TOP_K, axis=1)[:, :TOP_K], True, axis=1)
    counts = chosen.reshape(draws, groups, -1).sum(2)
    return float(counts.max(1).mean()), float(counts.mean())


def program(rows: int, arithmetic: Arithmetic, experts: float) -> Iterator[Instruction]:
    """`experts`: how many the fullest rank reads per layer."""
    yield Send("embed", 0)
    yield Wait("embed")
    yield Fetch(("attention", 0), _mixer(0, rows))
    yield Fetch(("router", 0), DENSE)
    for layer in range(LAYERS):
        yield from _layer(layer, rows, arithmetic, experts)
    yield Fetch("head", HEAD)
    yield Wait("head")
    yield Send("token", 0)
    yield Wait("token")


def _mixer(layer: int, rows: int) -> int:
    return MLA if layer in MLA_LAYERS else KDA + 2 * rows * KDA_STATE


def _exchange(*names: str) -> Iterator[Instruction]:
    for name in names:
        yield Send(name, 0)
        yield Wait(name)


def _layer(layer: int, rows: int, arithmetic: Arithmetic, experts: float) -> Iterator[Instruction]:
    fixed = Compute(arithmetic.layer / STAGES)
    yield Wait(("attention", layer))
    yield fixed
    yield from _exchange("pair of features", "partial outputs", "pair of halves")
    yield Wait(("router", layer))
    if layer == 0:  # the dense layer's matrices, and its sum in two exchanges
        yield Compute(arithmetic.layer * (STAGES - 1) / STAGES + arithmetic.row * rows)
        yield from _exchange("dense scatter", "dense gather")
        yield from _prefetch(1, rows)
        return
    yield Fetch("shared", SHARED)
    yield fixed
    yield from _exchange("pair of router columns")
    pieces = _pieces(experts)
    for i, piece in enumerate(pieces[:SLOTS]):
        yield Fetch(("expert", i), piece * EXPERT)
    yield from _exchange("latents")
    yield Wait("shared")
    yield fixed
    for i, piece in enumerate(pieces):
        yield Wait(("expert", i))
        yield Compute(arithmetic.row * rows * piece / experts)
        if i + SLOTS < len(pieces):
            yield Fetch(("expert", i + SLOTS), pieces[i + SLOTS] * EXPERT)
    yield Fetch("up", LATENT_UP)
    yield from _prefetch(layer + 1, rows)
    yield from _exchange("lanes of a host", "hosts")
    yield Wait("up")
    yield fixed
    yield from _exchange("output")


def _prefetch(layer: int, rows: int) -> Iterator[Instruction]:
    if layer < LAYERS:
        yield Fetch(("attention", layer), _mixer(layer, rows))
        yield Fetch(("router", layer), ROUTER + LATENT_DOWN)


def _pieces(experts: float) -> list[float]:
    """Whole experts, and the fraction by which their mean number is not whole."""
    whole = int(experts)
    return [1.0] * whole + ([experts - whole] if experts > whole else [])


def step_seconds(rows: int, arithmetic: Arithmetic, rates: Rates) -> float:
    return play(program(rows, arithmetic, _fullest(rows)), rates).now


@functools.cache
def _fullest(rows: int) -> float:
    return busiest(rows, GROUPS)[0]


@functools.cache
def fit(rates: Rates) -> Arithmetic:
    """The two constants from the throughput at batch 1 and 8. Raises ValueError where none, not negative, gives it."""

    def fixed(row: float) -> float:
        return _root(lambda layer: step_seconds(1, Arithmetic(layer, row), rates) - 1 / TOKENS_PER_SECOND[1])

    def error(row: float) -> float:
        return step_seconds(8, Arithmetic(fixed(row), row), rates) - 8 / TOKENS_PER_SECOND[8]

    row = _root(error)
    return Arithmetic(fixed(row), row)


def _root(f: Callable[[float], float], high: float = 40e-6, exact: float = 1e-8) -> float:
    """Where a rising function in [0, high] is 0 up to `exact`, by false position (the Illinois form); 0 where it is
    above from the start. Raises ValueError where it is below at the end."""
    low, below, above = 0.0, f(0.0), f(high)
    if below >= 0:
        return low
    if above < 0:
        raise ValueError(f"no root up to {high}")
    side = 0
    while True:
        middle = high - above * (high - low) / (above - below)
        value = f(middle)
        if abs(value) < exact:
            return middle
        if value > 0:
            high, above, below = middle, value, below / 2 if side > 0 else below
        else:
            low, below, above = middle, value, above / 2 if side < 0 else above
        side = 1 if value > 0 else -1
