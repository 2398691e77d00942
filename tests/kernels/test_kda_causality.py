"""No output sees a later token, and no gradient an earlier cotangent, not even in the last bit.

A factor may be rounded by a later token that cancels in exact arithmetic only, and a trained model's loss can exploit
that (flash-linear-attention issue 1240). Values are compared, so 0 equals -0.
"""

import functools
import itertools

import numpy as np
import pytest

from pallas_kernels.common.testing import outputs_and_gradients
from pallas_kernels.kda import chunk_kda
from tests.kernels.kda_cases import Case
from tests.kernels.kda_makers import between, masked, normal, scaled
from tests.kernels.kda_oracle import TOKENS

QUICK_WITHOUT_BOUND = {(33, "bfloat16"), (130, "float32")}


def forms():
    lengths, types = (18, 22, 33, 50, 64, 130), ("float32", "bfloat16")
    for (name, bound), T, dtype in itertools.product({"bounded": -5.0, "any": None}.items(), lengths, types):
        quick = bound or (T, dtype) in QUICK_WITHOUT_BOUND
        yield pytest.param(bound, T, dtype, id=f"{name}-T{T}-{dtype}", marks=() if quick else pytest.mark.slow)


every_form = pytest.mark.parametrize(("bound", "T", "dtype"), list(forms()))


@functools.cache
def op(implementation, bound):
    return functools.partial(chunk_kda, implementation=implementation, gate_lower_bound=bound)


def example(bound, T, dtype):
    """Arguments, others of a different size, cotangents, and the rows from which on to change something."""
    shape = {"B": 1, "T": T, "H": 1, "HV": 2, "K": 16, "V": 8, "dtype": dtype}
    case = Case("causality", **shape, g=between(-1, 0))
    gate = masked(between(-5, 0), 0.3, bound or -1000)
    other = Case("causality-other", **shape, v=scaled(normal, 100), g=gate, beta=between(0, 2))
    return case.arguments(), other.arguments(), case.cotangents(), sorted({1, 16, T // 2, T - 1})


def changed(arguments, other, name, P):
    """One of the arguments replaced from row P on."""
    return arguments | {name: np.concatenate([arguments[name][:, :P], other[name][:, P:]], axis=1)}


@every_form
def test_outputs_and_the_gradient_of_q_see_no_later_token(implementation, bound, T, dtype):
    arguments, other, cotangents, rows = example(bound, T, dtype)
    (o, _), gradients = outputs_and_gradients(op(implementation, bound), arguments, cotangents)
    for P, name in itertools.product(rows, TOKENS):
        inputs = changed(arguments, other, name, P)
        (o_changed, _), gradients_changed = outputs_and_gradients(op(implementation, bound), inputs, cotangents)
        np.testing.assert_array_equal(o_changed[:, :P], o[:, :P], err_msg=f"o, {name} from {P} on")
        np.testing.assert_array_equal(gradients_changed["q"][:, :P], gradients["q"][:, :P], err_msg=f"{name}, {P}")
        assert name == "q" or not np.array_equal(gradients_changed["q"][:, P:], gradients["q"][:, P:])


@every_form
def test_gradients_see_no_later_token_without_a_cotangent(implementation, bound, T, dtype):
    arguments, other, (do, dstate), rows = example(bound, T, dtype)
    for P in rows:
        cotangents = np.concatenate([do[:, :P], np.zeros_like(do[:, P:])], axis=1), np.zeros_like(dstate)
        _, gradients = outputs_and_gradients(op(implementation, bound), arguments, cotangents)
        for name in TOKENS:
            inputs = changed(arguments, other, name, P)
            _, gradients_changed = outputs_and_gradients(op(implementation, bound), inputs, cotangents)
            for of, x in gradients.items():
                past = slice(None) if of == "initial_state" else slice(P)
                np.testing.assert_array_equal(gradients_changed[of][:, past], x[:, past], err_msg=f"{of}, {name}, {P}")


@every_form
def test_gradients_see_no_earlier_cotangent(implementation, bound, T, dtype):
    arguments, _, (do, dstate), rows = example(bound, T, dtype)
    _, gradients = outputs_and_gradients(op(implementation, bound), arguments, (do, dstate))
    for P in rows:
        do_changed = do.copy()
        do_changed[:, P] *= -100
        _, gradients_changed = outputs_and_gradients(op(implementation, bound), arguments, (do_changed, dstate))
        for name in TOKENS:
            before, after = gradients[name], gradients_changed[name]
            np.testing.assert_array_equal(after[:, P + 1 :], before[:, P + 1 :], err_msg=f"{name} after {P}")
            assert not np.array_equal(after[:, P], before[:, P])
