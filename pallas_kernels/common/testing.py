"""How kernels are compared with their oracles. Imported by tests and by the checks that run on hardware."""

import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

# Oracles hand over numpy arrays.
ArrayLike = jax.Array | np.ndarray


def relative_rms(actual, expected, *, floor: float = 0.0) -> float:
    """|actual - expected| / max(|expected|, floor) in the Euclidean norm, computed in float64; NaN where either is."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}: expected {expected.shape}")
    error, norm = float(np.linalg.norm(actual - expected)), max(float(np.linalg.norm(expected)), floor)
    if error == 0:
        return 0.0
    return error / norm if norm else float("inf")


def assert_close(name: str, actual, expected, tolerance: float, *, floor: float = 0.0) -> None:
    """Relative RMS within tolerance. `floor` stands in for the norm of an expected tensor that is (nearly) zero."""
    error = relative_rms(actual, expected, floor=floor)
    if not error <= tolerance:
        raise AssertionError(f"{name}: relative RMS error {error:.2e}, allowed {tolerance:.0e}")


def assert_gradients_close(
    actual: Mapping[str, ArrayLike], expected: Mapping[str, ArrayLike], tolerance: float | Mapping[str, float]
) -> None:
    """Every gradient within its tolerance, each measured against max(its norm, 1e-6 of the norm of all together)."""
    if actual.keys() != expected.keys():
        raise AssertionError(f"gradients of {sorted(actual)}: expected {sorted(expected)}")
    floor = 1e-6 * np.sqrt(sum(np.linalg.norm(np.asarray(x, np.float64)) ** 2 for x in expected.values()))
    for name, value in expected.items():
        allowed = tolerance if isinstance(tolerance, float) else tolerance[name]
        assert_close(f"gradient of {name}", actual[name], value, allowed, floor=floor)


def outputs_and_gradients(
    op: Callable, arguments: Mapping[str, ArrayLike], cotangents: tuple[ArrayLike, ...]
) -> tuple[tuple[ArrayLike, ...], dict[str, ArrayLike]]:
    """The outputs of op(**arguments) and the gradients of <outputs, cotangents> for every floating argument.

    Compiled once per op and shapes: pass the same function object again to reuse it.
    """
    floating = {name: x for name, x in arguments.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    others = {name: x for name, x in arguments.items() if name not in floating}
    gradients, outputs = _compiled(op)(floating, others, cotangents)
    return outputs, gradients


@functools.cache
def _compiled(op):
    def objective(floating, others, cotangents):
        outputs = op(**floating, **others)
        terms = [jnp.sum(x.astype(c.dtype) * c) for x, c in zip(outputs, cotangents, strict=True)]
        return functools.reduce(jnp.add, terms), outputs

    return jax.jit(jax.grad(objective, has_aux=True))


def in_float64(
    op: Callable, arguments: Mapping[str, ArrayLike], cotangents: tuple[ArrayLike, ...]
) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """`outputs_and_gradients` with every floating array widened to float64: for oracles."""

    def widen(x):
        x = np.asarray(x)
        return x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float64)

    with jax.enable_x64(True):
        result = outputs_and_gradients(
            op, *jax.tree.map(lambda x: jnp.asarray(widen(x)), (dict(arguments), cotangents))
        )
        return jax.tree.map(np.asarray, result)


def equations(jaxpr) -> Iterator:
    """Every equation of a jaxpr, those of loops, branches and other inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(getattr(inner, "jaxpr", inner))


def low_precision_products(jaxpr) -> list[str]:
    """The float32 matrix products that do not ask for highest precision; a TPU would make them one bfloat16 pass."""
    highest = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    return [
        str(equation)
        for equation in equations(jaxpr)
        if equation.primitive.name in ("dot_general", "ragged_dot_general")
        and any(x.aval.dtype == jnp.float32 for x in equation.invars)
        and equation.params["precision"] not in (highest, jax.lax.Precision.HIGHEST)
    ]
