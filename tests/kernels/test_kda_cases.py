"""Every implementation against the float64 recurrence in NumPy, over the table of kda_cases.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.testing import assert_close, assert_gradients_close, in_float64
from pallas_kernels.kda import chunk_kda, recurrent_kda
from tests.kernels import kda_oracle
from tests.kernels.kda_cases import CASES, DECODE, SPLITS, Case

BY_ID = {case.id: case for case in CASES}
RESULTS = ("o", "final_state")
FLA = {"q": 8e-3, "k": 8e-3, "v": 8e-3, "initial_state": 8e-3, "g": 2e-2, "beta": 2e-2}
# Relative RMS of the results and of the gradients, by a case's kind; bfloat16 as flash-linear-attention's own tests.
LIMITS = {
    ("pallas", "float32"): {
        "plain": (2e-5, 1e-4),
        "steep": (2e-5, 1e-4),
        "correlated": (1e-4, 1e-4),
        "alternating": (1e-4, 1e-4),
        "copies": (1e-4, 1e-4),
        "one key": (1e-4, 1e-4),
        "forgetful": (1e-5, 1e-4),
    },
    # Of keys that alternate in sign, and of beta's gradient for one key, little more is asked than to be finite: what a
    # token adds is small beside what was predicted, and rounding the factors of L, of norm 120, already loses 5 %.
    ("pallas", "bfloat16"): {
        "plain": (5e-3, FLA),
        "alike": (2e-2, 2e-2),
        "correlated": (3e-2, 3e-2),
        "alternating": (1e-1, 3e-1),
        "reflected": (1e-1, 3e-1),
        "copies": (3e-2, dict.fromkeys(FLA, 3e-2) | {"beta": 2.0}),
        "one key": (3e-2, dict.fromkeys(FLA, 3e-2) | {"beta": 1e-1}),
    },
    # It rounds inputs and outputs only.
    ("xla", "float32"): {
        "plain": (2e-6, 1e-5),
        "steep": (2e-5, 1e-4),
        "raw": (2e-5, 1e-4),
        "correlated": (5e-6, 3e-5),
        "alternating": (5e-6, 3e-5),
        "reflected": (2e-5, 1e-4),
        "copies": (5e-6, 3e-5),
        "one key": (5e-6, 3e-5),
    },
    ("xla", "bfloat16"): {
        "plain": ({"o": 3e-3, "final_state": 2e-6}, 3e-3),
        "steep": ({"o": 3e-3, "final_state": 2e-5}, 3e-3),
        "correlated": ({"o": 3e-3, "final_state": 5e-6}, 3e-3),
        "grouped": ({"o": 3e-3, "final_state": 2e-6}, 5e-3),  # the value heads of a key head are added in bfloat16
        "alternating": ({"o": 3e-3, "final_state": 5e-6}, 3e-3),
        "reflected": ({"o": 3e-3, "final_state": 2e-5}, 3e-3),
        "copies": ({"o": 3e-3, "final_state": 5e-6}, 3e-3),
        "one key": ({"o": 3e-3, "final_state": 5e-6}, 3e-3),
    },
}
LARGEST = 2**31  # state updates of a case; of a larger one only two heads are compared


@functools.cache
def compiled(op, optimise: bool):
    """Results and, where they have cotangents, the gradients of the floating arguments."""

    def run(floating, others, cotangents):
        if not cotangents:
            return op(**floating, **others), {}
        results, pullback = jax.vjp(lambda floating: op(**floating, **others), floating)
        return results, pullback(cotangents)[0]

    # Of a small case, compiling would be most of the time.
    return jax.jit(run, compiler_options={} if optimise else {"xla_backend_optimization_level": 0})


@functools.cache
def chunked(implementation, bound, scale):
    return functools.partial(chunk_kda, implementation=implementation, gate_lower_bound=bound, scale=scale)


def split(arguments):
    """The floating arguments, and those that say where segments are."""
    others = {name: x for name, x in arguments.items() if name.startswith("segment")}
    return {name: x for name, x in arguments.items() if name not in others}, others


def of_heads(case: Case, heads, arrays):
    """Some heads of arrays by name, with the value heads that belong to them."""
    values = np.arange(case.HV).reshape(case.H, -1)[heads].ravel()

    def take(name, x):
        return np.take(x, heads if name in ("q", "k") else values, axis=1 if name.endswith("state") else 2)

    return {name: take(name, x) for name, x in arrays.items()}


def check(op, case: Case, of_results, of_gradients) -> None:
    floating, others = split(case.arguments())
    cotangents = dict(zip(RESULTS, case.cotangents(), strict=True)) if case.gradients else {}
    actual, gradients = compiled(op, case.slow)(floating, others, tuple(cotangents.values()))
    actual = dict(zip(RESULTS, map(np.asarray, actual), strict=True))
    gradients = {name: np.asarray(x) for name, x in gradients.items()}
    check_what_is_exact(case, floating, cotangents, actual, gradients)

    large = case.B * case.T * case.HV * case.K * case.V > LARGEST
    some = functools.partial(of_heads, case, [0, case.H - 1] if large and case.H > 1 else list(range(case.H)))
    scale = case.K**-0.5 if case.scale is None else case.scale
    expected, expected_gradients = kda_oracle.kda(some(floating), some(cotangents), case.runs(), scale)
    for name, a in some(actual).items():
        for row, (x, y) in enumerate(zip(a, expected[name], strict=True)):  # each may be of a regime of its own
            assert_close(f"{name}[{row}]", x, y, of_results[name], floor=1e-6 * y.size**0.5)
            assert case.kind != "raw" or np.abs(x - y).max() <= 5e-5 * np.abs(y).max()
    if case.gradients:
        expected_gradients = {name: expected_gradients[name] for name in gradients}
        assert_gradients_close(some(gradients), expected_gradients, of_gradients)


def check_what_is_exact(case: Case, arguments, cotangents, results, gradients) -> None:
    """Types; nothing comes of padding; a segment without tokens passes its state through; every number is finite."""
    assert results["o"].dtype == arguments["v"].dtype and results["final_state"].dtype == np.float32
    assert {name: x.dtype for name, x in gradients.items()} == {name: arguments[name].dtype for name in gradients}
    for name, x in (results | gradients).items():
        assert np.isfinite(x.astype(np.float32)).all(), name
        assert name.endswith("state") or not np.any(x[case.padding()]), name
    for run in case.runs():
        if not len(run.tokens) and "initial_state" in arguments:
            np.testing.assert_array_equal(results["final_state"][run.last], arguments["initial_state"][run.first])
            if gradients:
                expected = cotangents["final_state"][run.last]
                np.testing.assert_array_equal(gradients["initial_state"][run.first], expected)


def limits(case: Case, implementation: str):
    """Of the results and of the gradients, by name."""
    by_kind = LIMITS[implementation, case.dtype]
    results, gradients = by_kind.get(case.kind, by_kind["plain"])
    results = results if isinstance(results, dict) else dict.fromkeys(RESULTS, results)
    gradients = gradients if isinstance(gradients, dict) else dict.fromkeys(FLA, gradients)
    # A gradient is rounded to the type of its argument.
    return results, gradients | ({"initial_state": 8e-3} if case.state == "bfloat16" else {})


def marked(cases):
    return [pytest.param(x, id=x.id, marks=pytest.mark.slow if x.slow else ()) for x in cases]


@pytest.mark.parametrize("case", marked(CASES))
def test_case(implementation, case):
    case = case.cut() if implementation == "pallas" else case
    check(chunked(implementation, case.bound, case.scale), case, *limits(case, implementation))


@functools.cache
def in_two(op, at):
    """op on the tokens before `at`, then on the others from the state of the first."""

    def run(initial_state, **tokens):
        o1, state = op(**{name: x[:, :at] for name, x in tokens.items()}, initial_state=initial_state)
        o2, state = op(**{name: x[:, at:] for name, x in tokens.items()}, initial_state=state)
        return jnp.concatenate([o1, o2], axis=1), state

    return run


@pytest.mark.parametrize("case", marked(SPLITS))
def test_split(implementation, case):
    op = in_two(chunked(implementation, case.bound, case.scale), case.split)
    check(op, case, *limits(case, implementation))


recurrent = functools.cache(lambda implementation: functools.partial(recurrent_kda, implementation=implementation))


@pytest.mark.parametrize("case", DECODE, ids=lambda case: f"{case.id}-{case.dtype}")
def test_decode(case):
    check(recurrent("reference"), case, *limits(case, "xla"))


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, id=f"{x.id}-{x.dtype}", marks=pytest.mark.slow if x.B * x.H > 64 else ()) for x in DECODE],
)
def test_decode_by_the_kernel(case, interpreted):
    check(recurrent("pallas"), case, *limits(case, "xla"))


@pytest.mark.parametrize("name", ["fla-1-T63", "ours-HV6-of-2-any", "ours-65-ids-any", "ours-some-of-1-any"])
def test_the_reference_in_float64(name):
    """Two definitions, one in JAX and one in NumPy, one differentiated by JAX and one by hand, agree to rounding."""
    case = BY_ID[name]
    arguments, (do, dstate) = case.arguments(), case.cotangents()
    results, gradients = in_float64(chunked("reference", None, None), arguments, (do, dstate))
    cotangents = dict(zip(RESULTS, (do, dstate), strict=True))
    expected, expected_gradients = kda_oracle.kda(arguments, cotangents, case.runs(), case.K**-0.5)
    for name, x in zip(RESULTS, results, strict=True):
        assert_close(name, x, expected[name], 1e-13)
    assert_gradients_close(gradients, expected_gradients, 1e-12)


WRONG = {
    "a gate one token late": lambda x: x | {"g": jnp.roll(x["g"], 1, axis=1)},
    "beta squared": lambda x: x | {"beta": x["beta"] ** 2},
    "heads of the other groups": lambda x: x | {name: x[name][:, :, ::-1] for name in ("q", "k")},
    "the state transposed": lambda x: x | {"initial_state": x["initial_state"][:, :, ::-1]},
}


@pytest.mark.parametrize("variant", WRONG)
def test_a_wrong_variant_fails(variant):
    case = dataclasses.replace(BY_ID["ours-HV6-of-2-any"], V=24)
    with pytest.raises(AssertionError, match="relative RMS error"):
        check(lambda **x: chunk_kda(**WRONG[variant](x)), case, dict.fromkeys(RESULTS, 5e-3), 2e-2)
