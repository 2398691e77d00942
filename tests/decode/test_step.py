"""The whole step in TPU interpret mode, on fake devices with NaN-filled memory, against the reference step.

In float32 nothing is rounded: logits, states and caches agree to 1e-5, so tokens do wherever margins are larger. In
bfloat16 a sum in another order may round otherwise, and what follows moves by some roundings: tokens must agree where
the reference's margin is ten times the error, and the fixtures are chosen so.
"""

import subprocess

import pytest

from tests.decode.case import Case, Mutation, run

EXACTLY = 1e-5  # of logits, states and caches, absolute
# Margins of these tokens are at least ten times the error in every step.
DECISIVE = Case(rows=1, steps=4, start=(17,), tokens=(1105,), dtype="bfloat16", races=False)


def check_exact(case: Case) -> None:
    outcome = run(case)
    assert outcome.clean, outcome.stderr
    assert outcome.tokens == outcome.expected
    assert outcome.untouched
    assert max(outcome.errors.values()) < EXACTLY
    assert min(min(row) for row in outcome.margins) > 10 * outcome.errors["logits"]


def check_rounded(case: Case) -> None:
    outcome = run(case)
    assert outcome.clean, outcome.stderr
    assert outcome.errors["logits"] < 0.03
    assert min(min(row) for row in outcome.margins) > 10 * outcome.errors["logits"]
    assert outcome.tokens == outcome.expected


def test_greedy_tokens_of_thirteen_layers():
    """Four steps from position 17 on, over tiles of the cache, after random states."""
    check_rounded(DECISIVE)


EXACT = {
    "eager": Case(steps=2),
    "on_wait": Case(steps=2, mode="on_wait"),
    "cut-cache": Case(steps=2, cache_ranks=4, start=(15, 47)),
    "cut-cache-on_wait": Case(steps=2, cache_ranks=4, start=(15, 47), mode="on_wait"),
    "four-rows-one-idle": Case(steps=2, rows=4, start=(0, -1, 31, 62), tokens=(3, 77, 500, 9)),
    "sums-in-slices": Case(steps=2, whole_sum_bytes=0, mode="on_wait"),
    "two-steps-per-call": Case(layers=5, steps=4, per_call=2),
    "all-experts-equal": Case(layers=5, router=0.0),
    "same-token-same-place": Case(steps=1, rows=2, start=(5, 5), tokens=(9, 9)),
    "two-ranks": Case(layers=5, ranks=2),
    "eight-ranks": Case(layers=5, ranks=8, cache_ranks=8, start=(0, 127)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT)
def test_in_float32(case):
    check_exact(case)


@pytest.mark.slow
def test_thirty_two_ranks():
    """As many as K3 needs; in the interpreter a step takes minutes."""
    check_exact(Case(layers=4, rows=1, ranks=32, start=(5,), tokens=(3,), races=False))


@pytest.mark.slow
def test_sixteen_greedy_tokens():
    check_exact(Case(rows=1, steps=16, start=(17,), tokens=(1105,), races=False))


@pytest.mark.slow
def test_both_modes_in_bfloat16():
    for mode in ("eager", "on_wait"):
        check_rounded(Case(rows=1, steps=4, start=(17,), tokens=(1260,), dtype="bfloat16", mode=mode))


# Mistakes that only arithmetic shows; those of synchronisation are in test_protocol.py.
MISTAKES = {
    "gate-before-norm": Mutation("kda", "rms(o, core.config.norm_eps,", "rms(o * norm, core.config.norm_eps,"),
    "state-of-the-wrong-layer": Mutation("kda", ".at[number, core.slots.entry", ".at[0, core.slots.entry"),
    "bias-in-the-weights": Mutation("router", "p[row : row + 1], len", "scores[row : row + 1], len"),
    "the-wrong-quarter": Mutation("experts", "quarter == i,", "quarter == QUARTERS - i,"),
    "one-token-too-many": Mutation("mla", "<= position, s, LOWEST", "<= position + 1, s, LOWEST"),
    "bank-row-unmasked": Mutation("attn_res", "<= block, s, -jnp.inf", "<= block + 1, s, -jnp.inf"),
    "sum-without-one-rank": Mutation("collectives", "for n in range(1, self.ranks)", "for n in range(2, self.ranks)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(mutation):
    outcome = run(Case(layers=5, races=False, mutations=(mutation,)))
    assert not max(outcome.errors.values()) < EXACTLY


@pytest.mark.slow
def test_a_wait_too_many_hangs_and_is_red():
    wait = "pltpu.make_async_copy(others, others, semaphores.at[self._number(name)]).wait()"
    mutation = Mutation("collectives", wait, f"{wait}\n            {wait}")
    with pytest.raises((subprocess.TimeoutExpired, RuntimeError)):
        run(Case(layers=5, races=False, mutations=(mutation,)), timeout=90)
