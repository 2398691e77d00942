"""Packed rows, padding and per-segment states: every segment as if it ran alone, whatever stands in the padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.testing import assert_close, assert_gradients_close, outputs_and_gradients
from pallas_kernels.kda import chunk_kda, recurrent_kda

FORMS = [("reference", None), ("xla", -5.0), ("xla", None)]
IDS = ["reference", "bounded", "any"]
TOKENS = ("q", "k", "v", "g", "beta")


@functools.cache
def op(implementation, bound):
    """One function per form, so that its compilations are shared by the tests."""
    return functools.partial(chunk_kda, gate_lower_bound=bound, implementation=implementation)


def inputs(seed, T, B=1, states=None, H=2, K=8, V=12):
    random = np.random.default_rng(seed)
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in random.standard_normal((2, B, T, H, K))]
    made = {
        "q": unit[0],
        "k": unit[1],
        "v": random.standard_normal((B, T, H, V)),
        "g": -5 * random.random((B, T, H, K)) ** 3,
        "beta": random.random((B, T, H)),
        "initial_state": random.standard_normal((states or B, H, K, V)),
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in made.items()}


def cotangents(arguments):
    o, state = arguments["v"], arguments["initial_state"]
    keys = jax.random.split(jax.random.key(7))
    return jax.random.normal(keys[0], o.shape), jax.random.normal(keys[1], state.shape)


def alone(arguments, d, row, tokens, state, dstate):
    """The recurrence over some tokens of a row by themselves: outputs [n, H, V], state and gradients.

    One compilation for all: the rest of the length is filled with tokens of k = v = g = beta = 0, which do nothing.
    """

    def take(x):
        taken = np.zeros((1, 48, *x.shape[2:]), np.float32)
        taken[0, : len(tokens)] = np.asarray(x)[row, tokens]
        return jnp.asarray(taken)

    part = {name: take(arguments[name]) for name in TOKENS} | {"initial_state": state}
    (o, state), gradients = outputs_and_gradients(op("reference", None), part, (take(d[0]), dstate))
    of_tokens = {name: np.asarray(gradients[name])[0, : len(tokens)] for name in TOKENS}
    return np.asarray(o)[0, : len(tokens)], state, of_tokens, gradients["initial_state"]


def assert_same(actual, expected):
    for name, a, b in zip(("o", "final_state"), actual[0], expected[0], strict=True):
        assert_close(name, a, b, 2e-6)
    assert_gradients_close(actual[1], expected[1], 1e-5)


@pytest.mark.parametrize(("implementation", "bound"), FORMS, ids=IDS)
@pytest.mark.parametrize("lengths", [(5, 0, 17, 16, 1, 1), (0, 33, 0), (0, 0)], ids=str)
def test_offsets(lengths, implementation, bound):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    T = int(offsets[-1]) + 3  # three tokens beyond the last segment are padding
    arguments = inputs(1, T, states=len(lengths))
    d = cotangents(arguments)
    expected_o, expected_state = np.zeros(arguments["v"].shape), np.zeros(arguments["initial_state"].shape)
    gradients = {name: np.zeros(x.shape) for name, x in arguments.items()}
    for n, (start, stop) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        one, tokens = slice(n, n + 1), np.arange(start, stop)
        o, state, grad, dstate = alone(arguments, d, 0, tokens, arguments["initial_state"][one], d[1][one])
        expected_o[0, tokens], expected_state[one], gradients["initial_state"][one] = o, state, dstate
        for name in TOKENS:
            gradients[name][0, tokens] = grad[name]

    arguments = {n: x if n == "initial_state" else x.at[:, T - 3 :].set(jnp.nan) for n, x in arguments.items()}
    arguments["segment_offsets"] = jnp.asarray(offsets, jnp.int32)
    actual = outputs_and_gradients(op(implementation, bound), arguments, d)
    assert_same(actual, ((expected_o, expected_state), gradients))
    for n in np.flatnonzero(np.diff(offsets) == 0):
        np.testing.assert_array_equal(actual[0][1][n], arguments["initial_state"][n])
        np.testing.assert_array_equal(actual[1]["initial_state"][n], d[1][n])


# Rows of ids (letters are segments, dots padding), all 40 long: resets at, before and after multiples of 16, one-token
# segments, padding at the left, inside a segment, between segments and at the right, an id that returns, only padding.
ROWS = [
    "a" * 16 + "b" * 16 + "c" * 8,
    "a" * 15 + "b" * 2 + "c" * 14 + "d" * 9,
    "....." + "a" * 20 + "bcde" + "f" * 11,
    "a" * 7 + "." * 6 + "a" * 7 + "b" * 3 + "." * 14 + "b" * 3,
    "a" * 10 + "." * 10 + "b" * 5 + "a" * 5 + "." * 10,
    "." * 17 + "z" * 23,
    "." * 40,
]


def ids_of(row):
    return [ord(c) - ord("a") if c != "." else -1 - i % 2 for i, c in enumerate(row)]


@pytest.mark.parametrize(("implementation", "bound"), FORMS, ids=IDS)
def test_ids(implementation, bound):
    """Against the tokens of each segment gathered by hand; the padding holds NaN, in inputs and in cotangents."""
    ids = np.array([ids_of(row) for row in ROWS])
    arguments = inputs(2, 40, B=len(ROWS))
    d = cotangents(arguments)
    expected_o, expected_state = np.zeros(arguments["v"].shape), np.array(arguments["initial_state"])
    gradients = {name: np.zeros(x.shape) for name, x in arguments.items()}
    gradients["initial_state"] = np.array(d[1])
    for b, row in enumerate(ids):
        (valid,) = np.nonzero(row >= 0)
        cuts = [0, *(np.flatnonzero(np.diff(row[valid])) + 1), len(valid)]
        runs = [valid[a:z] for a, z in zip(cuts[:-1], cuts[1:], strict=True) if z > a]
        for n, tokens in enumerate(runs):
            first, last = n == 0, n == len(runs) - 1
            state = arguments["initial_state"][b : b + 1]
            state = state if first else jnp.zeros_like(state)
            dstate = d[1][b : b + 1] if last else jnp.zeros_like(d[1][:1])
            expected_o[b, tokens], state, grad, dstate = alone(arguments, d, b, tokens, state, dstate)
            for name in TOKENS:
                gradients[name][b, tokens] = grad[name]
            if first:
                gradients["initial_state"][b] = dstate[0]
            if last:
                expected_state[b] = state[0]

    padding = jnp.asarray(ids < 0)

    def poison(x):
        return jnp.where(padding.reshape(*padding.shape, *(1,) * (x.ndim - 2)), jnp.nan, x)

    arguments = {n: x if n == "initial_state" else poison(x) for n, x in arguments.items()}
    arguments["segment_ids"] = jnp.asarray(ids, jnp.int32)

    def without_padding(x):  # the objective itself must not multiply NaN by the zeros of the output
        return jnp.where(padding[..., None, None], 0, x)

    actual = outputs_and_gradients(op(implementation, bound), arguments, (without_padding(d[0]), d[1]))
    assert_same(actual, ((expected_o, expected_state), gradients))
    assert not np.any(np.asarray(actual[0][0])[np.asarray(padding)])
    for name in TOKENS:
        assert not np.any(np.asarray(actual[1][name])[np.asarray(padding)]), name
    np.testing.assert_array_equal(actual[0][1][-1], arguments["initial_state"][-1])


def test_padding_ignores_its_cotangent():
    arguments = inputs(3, 20)
    arguments["segment_ids"] = jnp.asarray([[0] * 12 + [-1] * 8], jnp.int32)
    do, dstate = cotangents(arguments)
    for implementation, bound in FORMS:
        _, gradients = outputs_and_gradients(op(implementation, bound), arguments, (do.at[:, 12:].set(1e30), dstate))
        assert all(np.isfinite(x).all() and np.abs(x).max() < 1e6 for x in gradients.values())


def test_padding_leaves_the_state_bit_for_bit():
    arguments = inputs(4, 12)
    padded = {n: jnp.pad(x, [(0, 0), (0, 30), *[(0, 0)] * (x.ndim - 2)], constant_values=jnp.nan)
              for n, x in arguments.items() if n != "initial_state"}  # fmt: skip
    padded["initial_state"] = arguments["initial_state"]
    ids = jnp.asarray([[5] * 12 + [-1] * 30], jnp.int32)
    for bound in (None, -5.0):
        _, state = chunk_kda(**arguments, gate_lower_bound=bound)
        _, after = chunk_kda(**padded, segment_ids=ids, gate_lower_bound=bound)
        np.testing.assert_array_equal(after, state)
    _, state = recurrent_kda(**arguments)
    _, after = recurrent_kda(**padded, segment_ids=ids)
    np.testing.assert_array_equal(after, state)


def test_ids_under_strict_promotion(strict_promotion):
    arguments = inputs(5, 20)
    ids = jnp.asarray([[0] * 12 + [1] * 8], jnp.int32)
    arguments |= {n: arguments[n].astype(jnp.bfloat16) for n in ("q", "k", "v")}
    for implementation, bound in FORMS:
        for segments in ({"segment_ids": ids}, {"segment_offsets": jnp.asarray([0, 20], jnp.int32)}):
            jax.eval_shape(op(implementation, bound), **arguments, **segments)
