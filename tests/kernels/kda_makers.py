"""How the inputs of Kimi Delta Attention are made for tests: queries, keys, values, gates, write strengths."""

from collections.abc import Callable

import numpy as np

# Makes a float array of a shape: [B, T, H, K] of q and k, [B, T, HV, V] of v, [B, T, HV, K] of g, [B, T, HV] of beta.
Maker = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(random, shape):
    return random.standard_normal(shape, np.float32)


def unit(random, shape):
    x = normal(random, shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def off_centre(random, shape):
    """Ten times normal less 50, normalised: the keys of flash-linear-attention's context parallel tests."""
    x = 10 * normal(random, shape) - 50
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def constant(value: float) -> Maker:
    return lambda random, shape: np.full(shape, value, np.float32)


def scaled(make: Maker, factor: float) -> Maker:
    return lambda random, shape: np.float32(factor) * make(random, shape)


def between(low: float, high: float) -> Maker:
    return lambda random, shape: np.float32(low) + np.float32(high - low) * random.random(shape, np.float32)


def logsigmoid(normaliser: float = 1.0) -> Maker:
    """A gate of normal logits, as flash-linear-attention's tests have it: 0.1 forgets at once, 10 hardly."""
    return lambda random, shape: np.logaddexp(0, normal(random, shape)) / np.float32(-normaliser)


def softplus(low: float, high: float) -> Maker:
    """Kimi Linear's gate of normal logits, with a rate per head between low and high."""

    def make(random, shape):
        return -between(low, high)(random, (shape[2], 1)) * np.logaddexp(0, normal(random, shape))

    return make


def zeros(random, shape):
    return np.zeros(shape, np.float32)


def bounded(logits: Maker = normal, bias: Maker = zeros) -> Maker:
    """K3's gate at a rate of 1 and a bound of -5, with a bias per channel."""
    return lambda random, shape: -5 / (1 + np.exp(-logits(random, shape) - bias(random, shape[2:])))


def masked(make: Maker, share: float, value: float) -> Maker:
    """A share of the entries replaced by a value."""
    return lambda random, shape: np.where(random.random(shape) < share, np.float32(value), make(random, shape))


def spread(*values: float) -> Maker:
    """As many runs of channels as values, each constant."""
    return lambda random, shape: np.broadcast_to(np.repeat(np.float32(values), shape[-1] // len(values)), shape)


def per_head(make: Maker) -> Maker:
    """The same for every channel of a head."""
    return lambda random, shape: np.broadcast_to(make(random, (*shape[:-1], 1)), shape)


def copies(make: Maker) -> Maker:
    """One token again and again."""
    return lambda random, shape: np.broadcast_to(make(random, (shape[0], 1, *shape[2:])), shape)


def then(length: int, first: Maker, second: Maker) -> Maker:
    """One maker for the first tokens, another for the rest."""

    def make(random, shape):
        return np.concatenate([first(random, shape)[:, :length], second(random, shape)[:, length:]], axis=1)

    return make


def rows(*makers: Maker) -> Maker:
    """A maker for each row of the batch."""
    return lambda random, shape: np.concatenate([make(random, (1, *shape[1:])) for make in makers])


def correlated(rho: float) -> Maker:
    """Unit vectors with cosines around rho."""

    def make(random, shape):
        x = rho**0.5 * copies(unit)(random, shape) + (1 - rho) ** 0.5 * unit(random, shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    return make


def alternating(random, shape):
    """One unit vector that points the other way at every other token."""
    signs = np.where(np.arange(shape[1]) % 2, np.float32(-1), np.float32(1))
    return copies(unit)(random, shape) * signs[:, None, None]
