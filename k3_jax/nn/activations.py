"""Activation manager: which tensors of a layer stay from the forward to the backward pass, and in what form (§5.2.2).

A layer names its tensors (`named`). The backward pass runs the layer again; a tensor that was kept then takes the place
of the computed one, whose gradient still flows on, and what was computed only for it is not computed again. What is
kept, and how, is the recipe's (`TrainConfig.activations`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3_jax.config import Keep, Offload, Quantize

Policy = tuple[Keep, ...]
Stored = Any  # an array, or the pair (numbers, scales)

# Numbers to a scale; the largest E4M3; the smallest block that is not taken for zeros: below, a scale would be zero.
BLOCK, LARGEST, SMALLEST = 128, 448.0, 1e-30

# What `named` does while a layer is traced.
_visit: ContextVar[Callable[[str, Array], Array]] = ContextVar("visit", default=lambda name, x: x)


def named(name: str, x: Array) -> Array:
    """x, under a name of `config.ACTIVATIONS`."""
    return _visit.get()(name, x)


@contextmanager
def recording(policy: Policy) -> Iterator[dict[str, Stored]]:
    """Gives a dict that fills with what the layers inside are to keep."""
    kept, keeps = {}, {keep.name: keep for keep in policy}

    def visit(name: str, x: Array) -> Array:
        if name in keeps:
            kept[name] = store(keeps[name], x)
        return x

    with _visiting(visit):
        yield kept


@contextmanager
def replaying(policy: Policy, kept: dict[str, Stored]) -> Iterator[None]:
    """Layers inside find what was kept."""
    keeps = {keep.name: keep for keep in policy}

    def visit(name: str, x: Array) -> Array:
        return _instead_of(x, restore(keeps[name], kept[name], x.dtype)) if name in kept else x

    with _visiting(visit):
        yield


@contextmanager
def _visiting(visit: Callable[[str, Array], Array]) -> Iterator[None]:
    token = _visit.set(visit)
    try:
        yield
    finally:
        _visit.reset(token)


@jax.custom_jvp
def _instead_of(x: Array, kept: Array) -> Array:
    """`kept`, with the gradient of x."""
    return kept


@_instead_of.defjvp
def _(primals, tangents):
    return primals[1], tangents[0]


def store(keep: Keep, x: Array) -> Stored:
    stored: Stored = x
    for step in keep.through:
        match step:
            case Quantize():
                stored = quantize(x)
            case Offload():
                stored = jax.device_put(stored, jax.memory.Space.Host)
    return stored


def restore(keep: Keep, stored: Stored, dtype) -> Array:
    for step in reversed(keep.through):
        match step:
            case Quantize():
                stored = dequantize(*stored, dtype)
            case Offload():
                stored = jax.device_put(stored, jax.memory.Space.Device)
    return stored


def quantize(x: Float[Array, "*r W"]) -> tuple[Float[Array, "*r W"], Float[Array, "*r blocks"]]:
    """E4M3 numbers and the scale of each block of 128 along the last axis (of all of it, if that is no multiple)."""
    block = BLOCK if x.shape[-1] % BLOCK == 0 else x.shape[-1]
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, block)
    scale = jnp.maximum(jnp.abs(blocks).max(-1), SMALLEST) / LARGEST
    numbers = (blocks / scale[..., None]).astype(jnp.float8_e4m3fn)
    return numbers.reshape(x.shape), scale


def dequantize(numbers: Float[Array, "*r W"], scale: Float[Array, "*r blocks"], dtype) -> Float[Array, "*r W"]:
    blocks = numbers.astype(jnp.float32).reshape(*scale.shape, -1)
    return (blocks * scale[..., None]).reshape(numbers.shape).astype(dtype)
