"""What a kernel does to semaphores and buffers on one rank, read off its jaxpr: a list of events in program order.

Scalars are computed (the rank's number, tables in SMEM, positions, loop counters), vectors are not: which copies a
kernel starts and awaits does not depend on them. Scalars that a kernel makes of vectors are taken to be 0; in the
decode step these are the chosen experts, which change addresses only.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic import primitives as mosaic
from jax.extend.core import Var

BARRIER = "barrier"


@dataclass(frozen=True)
class Place:
    """Entry `index` of a buffer's first axis and `second` of its second one, or all of it (None). `buffer` is the
    number of a kernel's argument."""

    buffer: int
    index: int | None
    second: int | None = None

    def meets(self, other: "Place") -> bool:
        pairs = ((self.index, other.index), (self.second, other.second))
        return self.buffer == other.buffer and all(None in pair or pair[0] == pair[1] for pair in pairs)


@dataclass(frozen=True)
class Start:
    """A copy of `size` bytes. `peer` is the rank that has `target` and `arrived`; None is this one, without `sent`."""

    source: Place
    target: Place
    arrived: tuple
    size: int
    peer: int | None = None
    sent: tuple | None = None


@dataclass(frozen=True)
class Wait:
    semaphore: tuple
    size: int


@dataclass(frozen=True)
class Signal:
    semaphore: tuple
    peer: int
    size: int


@dataclass(frozen=True)
class Access:
    place: Place
    writes: bool


Event = Start | Wait | Signal | Access


class Unknown:
    """The value of a vector, or of a scalar made of one."""

    def __repr__(self):
        return "unknown"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class Ref:
    """A kernel's argument; `content` are the numbers of a table in SMEM."""

    number: int
    aval: Any
    content: np.ndarray | None = None


class FollowError(RuntimeError):
    """The kernel branches on something that is not known."""


def _divide(a: int, b: int) -> int:
    return int(math.trunc(a / b)) if abs(a) < 2**50 else -((-a) // b) if (a < 0) != (b < 0) else a // b


_SCALARS: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "rem": lambda a, b: a - b * _divide(a, b),
    "max": max,
    "min": min,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.not_,
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x,
    "multiple_of": lambda x: x,
}


def follow(jaxpr, arguments: Sequence[Ref], rank: int) -> list[Event]:
    """The events of rank `rank` in a kernel's jaxpr with these arguments."""
    run = _Follower(rank)
    return list(run.body(jaxpr, arguments, []))


@dataclass(frozen=True)
class _Follower:
    rank: int

    def body(self, jaxpr, arguments: Sequence, results: list) -> Iterator[Event]:
        """Events of a jaxpr; appends the values of its outputs to `results`."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        value = lambda x: known.get(x, UNKNOWN) if isinstance(x, Var) else _literal(x)  # noqa: E731
        for equation in jaxpr.eqns:
            inputs, outputs = [value(x) for x in equation.invars], []
            yield from self.equation(equation, inputs, outputs)
            known.update(zip(equation.outvars, outputs, strict=bool(outputs)))
        results.extend(value(x) for x in jaxpr.outvars)

    def equation(self, equation, inputs: list, outputs: list) -> Iterator[Event]:
        name, params = equation.primitive.name, equation.params
        if name in _SCALARS and not any(isinstance(x, Unknown) for x in inputs):
            outputs.append(_SCALARS[name](*inputs))
        elif name == "axis_index":
            outputs.append(self.rank)
        elif hasattr(self, name):
            yield from getattr(self, name)(params, inputs, outputs)
        elif name == "jit":
            yield from self.body(params["jaxpr"], inputs, outputs)
        elif any(isinstance(x, Ref) for x in inputs):
            raise FollowError(f"{name} of a reference: expected an operation that `follow` knows")

    def cond(self, params, inputs, outputs):
        index = inputs[0]
        if isinstance(index, Unknown):
            raise FollowError("a branch on a vector: which copies it makes is not known")
        yield from self.body(params["branches"][int(index)], inputs[1:], outputs)

    def scan(self, params, inputs, outputs):
        constants, carry, stacked = (list(x) for x in params["ft_in"].update(inputs).unpack())
        for _ in range(params["length"]):
            after: list = []
            yield from self.body(params["jaxpr"], [*constants, *carry, *[UNKNOWN] * len(stacked)], after)
            carry = after[: len(carry)]
        outputs.extend(carry)

    def while_(self, params, inputs, outputs):
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = inputs[second:]
        while True:
            go_on: list = []
            yield from self.body(params["cond_jaxpr"], [*inputs[:first], *carry], go_on)
            if isinstance(go_on[0], Unknown):
                raise FollowError("a loop whose length depends on a vector")
            if not go_on[0]:
                break
            after: list = []
            yield from self.body(params["body_jaxpr"], [*inputs[first:second], *carry], after)
            carry = after
        outputs.extend(carry)

    def get(self, params, inputs, outputs):
        ref, place = _place(inputs[0], jax.tree.unflatten(params["tree"], inputs[1:]))
        yield Access(place, False)
        if ref.content is not None:
            indices = jax.tree.leaves(inputs[1:])
            outputs.append(int(ref.content[tuple(indices)]))
        elif str(ref.aval.memory_space) == "smem" and jnp.issubdtype(ref.aval.dtype, jnp.integer):
            outputs.append(0)

    def swap(self, params, inputs, outputs):
        yield Access(_place(inputs[0], jax.tree.unflatten(params["tree"], inputs[2:]))[1], True)

    def get_barrier_semaphore(self, params, inputs, outputs):
        outputs.append(Ref(-1, None))
        yield from ()

    def semaphore_signal(self, params, inputs, outputs):
        ref, indexers, count, peer, _ = jax.tree.unflatten(params["args_tree"], inputs)
        yield Signal(_semaphore(ref, indexers), self.rank if peer is None else peer[0], count)

    def semaphore_wait(self, params, inputs, outputs):
        ref, indexers, count, _ = jax.tree.unflatten(params["args_tree"], inputs)
        yield Wait(_semaphore(ref, indexers), count)

    def dma_start(self, params, inputs, outputs):
        source, target, arrived, sent, peer = mosaic._dma_unflatten(params["tree"], inputs)
        size, peer = _bytes(source), None if peer is None else peer[0]
        sent = None if sent is None else _semaphore(*_parts(sent))
        places = (_place(*_parts(source))[1], _place(*_parts(target))[1])
        yield Start(*places, _semaphore(*_parts(arrived)), size, peer, sent)

    def dma_wait(self, params, inputs, outputs):
        source, target, arrived, sent, _ = mosaic._dma_unflatten(params["tree"], inputs)
        semaphore = sent if params["is_wait_send"] else arrived
        yield Wait(_semaphore(*_parts(semaphore)), _bytes(source if params["is_wait_send"] else target))


setattr(_Follower, "while", _Follower.while_)


def _literal(x):
    value = x.val
    return value.item() if hasattr(value, "item") and np.ndim(value) == 0 else UNKNOWN if np.ndim(value) else value


def _parts(ref) -> tuple[Ref, tuple]:
    return (ref.ref, ref.transforms) if hasattr(ref, "transforms") else (ref, ())


def _place(ref: Ref, transforms) -> tuple[Ref, Place]:
    """Where on the first two axes."""
    if not transforms:
        return ref, Place(ref.number, None)
    indices = zip(transforms[0].indices[:2], ref.aval.shape, strict=False)
    return ref, Place(ref.number, *(_entry(index, size) for index, size in indices))


def _entry(index, size: int) -> int | None:
    """The only entry of an axis that an integer or a slice means, or None."""
    if hasattr(index, "size"):
        return index.start if index.size == 1 and isinstance(index.start, int) and size > 1 else None
    return None if isinstance(index, Unknown) else int(index)


def _semaphore(ref: Ref, transforms) -> tuple:
    """(number of the argument, index), or the barrier's."""
    if ref.number < 0:
        return (BARRIER,)
    _, place = _place(ref, transforms)
    return (place.buffer, place.index)


def _bytes(ref) -> int:
    ref, transforms = _parts(ref)
    shape = ref.aval.shape
    for transform in transforms:
        shape = transform.get_indexer_shape()
    return math.prod(shape) * jnp.dtype(ref.aval.dtype).itemsize
