"""The KDA mixer of a layer: projections from the tape, convolutions, decay gate, delta rule, gated output.

Heads are cut over the ranks. The state of the next KDA layer is on its way while this one computes. A row takes its
state from a slot of the caches, or from the row before it, whose sequence it goes on with, and leaves it in a slot. All
of a layer's states have come before the first of them leaves: a slot may be one row's entry and another one's exit.
"""

from collections.abc import Callable
from functools import partial
from operator import methodcaller

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.core import Core
from pallas_kernels.decode.reference import decay, rms
from pallas_kernels.decode.ring import Ring

STATE = ("S", "conv")
START, WAIT = methodcaller("start"), methodcaller("wait")


def mixer(core: Core, ring: Ring, links: Links, x, number, start) -> None:
    """Start the sum of the output for x [B, D] of KDA layer `number`; its tiles begin at `start`."""
    part, c = core.plan.tape.kda, core.config
    h, K = c.share(c.kda.heads), c.kda.head_dim
    projected = ring.product(part, start, "project", x)
    u, gate, f = projected[:, : 3 * h * K], projected[:, 3 * h * K : 4 * h * K], projected[:, 4 * h * K :]
    beta = jax.nn.sigmoid(ring.product(part, start, "beta", x))
    z = ring.product(part, start, "decay", f)
    _take_turns(core, number)
    rows = [
        [_head(core, lax.rem(number, 2), b, i, core.round(u), gate, z, beta) for i in range(h)] for b in range(c.rows)
    ]
    _store(core, number, START)
    o = jnp.concatenate([jnp.concatenate(heads, axis=1) for heads in rows], axis=0)
    links.start_sum("mixer_sum", ring.product(part, start, "output", o))


def _take_turns(core: Core, number) -> None:
    """Wait for this layer's state, then start the next one's, whose place in VMEM the layer before has left."""
    _load(core, number, WAIT)
    pl.when(number >= 1)(lambda: _store(core, number - 1, WAIT))
    pl.when(number + 1 < len(core.config.kda_layers))(lambda: _load(core, number + 1, START))


def begin(core: Core) -> None:
    """The first layer's state is on its way."""
    _load(core, 0, START)


def finish(core: Core) -> None:
    """The last layer's state has arrived in HBM."""
    _store(core, len(core.config.kda_layers) - 1, WAIT)


def _load(core: Core, number, act: Callable) -> None:
    """Start or await the way in of a layer's constants, and of the states of rows that enter from a slot."""
    act(core.load("heads", number))
    place = lax.rem(number, 2)

    def load(row: int) -> None:
        for name in STATE:
            source = getattr(core.caches, name).at[number, core.slots.entry[row]]
            target, semaphore = getattr(core.buffers, name).at[place, row], getattr(core.semaphores, name).at[place]
            act(pltpu.make_async_copy(source, target, semaphore))

    load(0)
    for row in range(1, core.config.rows):
        pl.when(core.slots.entry[row] >= 0)(partial(load, row))


def _store(core: Core, number, act: Callable) -> None:
    """Start or await the way back of the states of rows that decode."""
    place = lax.rem(number, 2)

    def store(row: int) -> None:
        for name in STATE:
            target = getattr(core.caches, name).at[number, core.slots.exit[row]]
            source, back = getattr(core.buffers, name).at[place, row], getattr(core.semaphores, f"{name}_back")
            act(pltpu.make_async_copy(source, target, back.at[place]))

    for row in range(core.config.rows):
        pl.when(core.live(row))(partial(store, row))


def _head(core: Core, place, row: int, head: int, u, gate, z, beta):
    """One head of one row: its gated output [1, K]. Updates S [K, V] and the convolutions' history in VMEM."""
    c, b = core.config.kda, core.buffers
    K, W, live = c.head_dim, c.conv_width, core.live(row)
    of = lambda x, part=0: x[row : row + 1, (part * z.shape[1] + head * K) :][:, :K]  # noqa: E731
    constants = b.heads[place, head]
    past = 3 * (W - 1)
    origin = jnp.where(core.slots.entry[row] < 0, row - 1, row) if row else row
    history = jnp.concatenate([b.conv[place, origin, head, :past], *(of(u, i) for i in range(3))], axis=0)
    taps = history * constants[: 3 * W]
    q, k, v = (jax.nn.silu(sum(taps[3 * t + i : 3 * t + i + 1] for t in range(W))) for i in range(3))
    q, k = (a * lax.rsqrt(jnp.sum(a * a, axis=1, keepdims=True) + 1e-6) for a in (q, k))
    bias, rate, norm = (constants[3 * W + i : 3 * W + i + 1] for i in range(3))
    a = jnp.exp(decay(of(z) + bias, rate, c.gate_lower_bound))
    before = b.S[place, origin, head]
    S = _column(a) * before
    error = v - jnp.sum(_column(k) * S, axis=0, keepdims=True)
    S = S + _column(k) * (beta[row : row + 1, head : head + 1] * error)
    o = jnp.sum(_column(q * core.config.own.head_dim**-0.5) * S, axis=0, keepdims=True)
    b.S[place, row, head] = jnp.where(live, S, before)
    b.conv[place, row, head, :past] = jnp.where(live, history[3:], history[:past])
    return rms(o, core.config.norm_eps, core.config.own.head_dim) * norm * jax.nn.sigmoid(of(gate))


def _column(row):
    """[1, K] -> [K, V = K]: a channel of a key scales a row of the state."""
    return jnp.broadcast_to(row, (row.shape[1], row.shape[1])).T
