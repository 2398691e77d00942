"""Random initial values that compile in milliseconds and do not depend on the mesh.

`jax.random` costs XLA:CPU about 0.2 s of compilation for every drawn array (threefry five times that), minutes for a
model. Here an element's bits are a hash of its index and of the module's key, one finaliser of MurmurHash3 per axis:
good enough to start training from, and nothing else in the project draws from it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

Init = Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]


@jax.jit
def _mix(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    """MurmurHash3's 32-bit finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def uniform(key: jax.Array, shape: tuple[int, ...], low: float, high: float) -> Float[Array, "*s"]:
    """float32 in (low, high), both ends excluded: 23 bits of hash and a half are exact."""
    state = [jnp.broadcast_to(word, shape) for word in jax.random.key_data(key)]  # two words: rows never coincide
    for axis in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(0x9E3779B9)
        state = [_mix(word ^ (index + jnp.uint32(i))) for i, word in enumerate(state)]
    bits = _mix(state[0] + state[-1])
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32((high - low) / 2**23) + low


def normal(std: float) -> Init:
    """Normal with mean 0."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
        return (std * jnp.sqrt(2.0) * jax.lax.erf_inv(uniform(key, shape, -1.0, 1.0))).astype(dtype)

    return init


def ones(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    return jnp.ones(shape, dtype)


def zeros(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    return jnp.zeros(shape, dtype)
