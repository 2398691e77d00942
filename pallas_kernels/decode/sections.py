"""A rank's arrays in stretches that can be made one after the other: each needs few of the model's tensors.

for section in sections_of(plan):
    for rank in range(plan.config.ranks):
        section.make(Packer(plan, rank), tensors)   # bytes section.begin to section.end of array section.array
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode.pack import ExpertCodes, Packer
from pallas_kernels.decode.plan import Plan

LAYOUT_VERSION = 2  # of what stands in the arrays: a change of tape, record, vectors or heads raises it
EXPERTS = 8  # of one section: of the released model 141 MB as stored, and four times that while they are repacked


class Tensors(Mapping[str, np.ndarray]):
    """A model's dense tensors by canonical name, and the codes of its routed experts."""

    @abstractmethod
    def codes(self, name: str, start: int, stop: int) -> ExpertCodes:
        """Of experts start..stop-1 of `layers.L.moe.w1|w3|w2`."""


@dataclass(frozen=True)
class Section:
    """Bytes [begin, end) of one array, of which `make` makes a rank's."""

    name: str
    array: str
    begin: int
    end: int
    make: Callable[[Packer, Tensors], np.ndarray]


def sections_of(plan: Plan) -> Iterator[Section]:
    """All of a rank's arrays, in the order of the layers."""
    c, tape = plan.config, plan.tape
    tile, record = (nbytes(plan.weights[name], skip) for name, skip in (("tape", 1), ("experts", 2)))
    moe = 0
    for layer, (kind, (mixer, channels)) in enumerate(zip(c.layers, tape.starts, strict=True)):
        after = channels + tape.parts(kind)[1].tiles
        name = f"layers.{layer}"
        yield Section(f"{name}.mixer", "tape", mixer * tile, channels * tile, partial(_mixer, layer))
        yield Section(f"{name}.channels", "tape", channels * tile, after * tile, partial(_channels, layer))
        if not kind.moe:
            continue
        for start in range(0, c.moe.experts, EXPERTS):
            stop, first = min(start + EXPERTS, c.moe.experts), moe * c.moe.experts
            make = partial(_experts, layer, start, stop)
            yield Section(f"{name}.experts.{start}", "experts", (first + start) * record, (first + stop) * record, make)
        moe += 1
    yield Section("head", "tape", tape.head_start * tile, tape.tiles * tile, Packer.head)
    for name in ("vectors", "heads", "keys", "embed"):
        yield Section(name, name, 0, nbytes(plan.weights[name]), getattr(Packer, name))


def nbytes(array: jax.ShapeDtypeStruct, skip: int = 0) -> int:
    """Of one element of the first `skip` axes."""
    return prod(array.shape[skip:]) * jnp.dtype(array.dtype).itemsize


def _mixer(layer: int, packer: Packer, tensors: Tensors) -> np.ndarray:
    return packer.mixer(tensors, layer)


def _channels(layer: int, packer: Packer, tensors: Tensors) -> np.ndarray:
    return packer.channels(tensors, layer)


def _experts(layer: int, start: int, stop: int, packer: Packer, tensors: Tensors) -> np.ndarray:
    return packer.records(*(tensors.codes(f"layers.{layer}.moe.{name}", start, stop) for name in ("w1", "w3", "w2")))
