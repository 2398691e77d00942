"""The plan of MoonEP: exact balance and the bound on borrowed experts, with a search for a counterexample; where each
row goes, against a list of all rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.parallel import expert_plan
from k3_jax.parallel.expert_plan import pieces, sources
from k3_jax.parallel.loan import pieces_home

make_plan = jax.jit(expert_plan.make_plan)


def counts_of(load, R, seed=0):
    """Some [R, E] with these totals per expert and the same number of rows on every source rank."""
    choices = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(load)), load))
    return np.stack([np.bincount(part, minlength=len(load)) for part in np.split(choices, R)]).astype(np.int32)


def whole(load, R, rows):
    """Real-valued shares of a load as integers that sum to R * rows."""
    exact = np.asarray(load, np.float64) / np.sum(load) * R * rows
    out = np.floor(exact).astype(int)
    out[np.argsort(out - exact, kind="stable")[: R * rows - out.sum()]] += 1
    return out


def check(counts):
    """Every promise of the plan; returns how many experts each rank borrows."""
    R, E = counts.shape
    m, rows = E // R, counts[0].sum()
    plan = jax.tree.map(np.asarray, make_plan(jnp.asarray(counts)))
    share, home = plan.share, np.arange(E) // m
    assert (share >= 0).all()
    np.testing.assert_array_equal(share.sum(0), counts.sum(0))
    np.testing.assert_array_equal(share.sum(1), rows)
    borrowed = (share > 0) & (home[None] != np.arange(R)[:, None])
    assert (home[None] == plan.donor[:, None])[borrowed].all(), "an expert of another rank than the donor"
    number = borrowed.sum(1)
    assert (number <= m).all()
    np.testing.assert_array_equal(number, plan.lent().sum(1))
    return number


def loads(kind, R, E, rng):
    m = E // R
    match kind:
        case "uniform":
            return rng.random(E) + 10
        case "zipf":
            return 1 / (1 + rng.permutation(E))
        case "dirichlet":
            return rng.dirichlet(np.full(E, 10 ** rng.uniform(-2, 1)))
        case "one_expert":
            return np.eye(E)[rng.integers(E)] + 1e-3
        case "one_rank":
            return np.repeat(np.eye(R)[rng.integers(R)], m) + 1e-9
        case "empty_rank":
            return np.repeat(1 - np.eye(R)[rng.integers(R)], m)
        case "few":
            return rng.random(E) * (rng.random(E) < 3 / E) + 1e-12


KINDS = ("uniform", "zipf", "dirichlet", "one_expert", "one_rank", "empty_rank", "few")


@pytest.mark.parametrize("R, E", [(2, 6), (4, 8), (8, 64), (16, 16), (64, 896)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_equal_and_slots_suffice(kind, R, E):
    rng = np.random.default_rng(R * E)
    for rows in (1, 7, 64, 513):
        check(counts_of(whole(loads(kind, R, E, rng), R, rows), R))


def test_search_for_a_counterexample():
    """Hill climbing for a load that needs more borrowed experts, from many starts: never more than E / R."""
    R, E, rows, rng = 6, 24, 40, np.random.default_rng(1)
    most = 0
    for start in range(12):
        load = whole(loads(KINDS[start % len(KINDS)], R, E, rng), R, rows)
        best = check(counts_of(load, R)).max()
        for _ in range(25):
            other = load.copy()
            a, b = rng.choice(np.flatnonzero(other)), rng.integers(E)
            moved = rng.integers(1, other[a] + 1)
            other[a] -= moved
            other[b] += moved
            found = check(counts_of(other, R)).max()
            if found >= best:
                load, best = other, found
        most = max(most, best)
    assert most == E // R, "the search should reach the bound"


@pytest.mark.parametrize("R, E", [(8, 896), (16, 896), (32, 896), (64, 896), (128, 896), (4, 8)])
def test_tight_input(R, E):
    """One rank's experts get nothing, all others the same: ceil(E (R - 1) / R^2) are needed there (report, App. E)."""
    load = np.repeat([0] + [1] * (R - 1), E // R) * R * 4  # E (R - 1) rows times 4: a multiple of R
    assert check(counts_of(load, R)).max() == -(-E * (R - 1) // R**2)


def test_mild_load_borrows_about_one_expert():
    """Sums of loads cut at random: each rank in need takes one expert, and no plan does with fewer moves in general."""
    R, E, rng = 64, 896, np.random.default_rng(0)
    load = rng.multinomial(R * 8192, np.full(E, 1 / E))
    number = check(counts_of(load, R))
    assert number.max() == 1 and number.sum() < R


def test_popular_experts_are_lent_first():
    """The fullest expert serves the largest want: lending others first would cost up to 14 per rank here."""
    R, E = 64, 896
    number = check(counts_of(whole(loads("zipf", R, E, np.random.default_rng(0)), R, 2048), R))
    assert number.max() <= 2 and number.mean() < 1.2


# --- Where the rows go ---


def listed(counts, share, donor):
    """rows[r] = [(source rank, place there)...] in the order of rank r's groups, from one list per expert."""
    R, E = counts.shape
    m = E // R
    start = np.cumsum(counts, axis=1) - counts
    queue = [[(s, start[s, e] + i) for s in range(R) for i in range(counts[s, e])] for e in range(E)]
    taken = {}
    for e in range(E):
        for r in range(R):
            taken[r, e], queue[e] = queue[e][: share[r, e]], queue[e][share[r, e] :]
    groups = lambda r: [*range(r * m, r * m + m), *(range(donor[r] * m, donor[r] * m + m) if donor[r] != r else ())]  # noqa: E731
    return [[row for e in groups(r) for row in taken[r, e]] for r in range(R)]


@functools.cache
def example(kind):
    R, E, rows = 4, 12, 50
    rng = np.random.default_rng(3)
    counts = counts_of(whole(loads(kind, R, E, rng), R, rows), R, seed=4)
    return counts, jax.tree.map(np.asarray, make_plan(jnp.asarray(counts)))


@pytest.mark.parametrize("kind", KINDS)
def test_sources_are_the_list(kind):
    counts, plan = example(kind)
    for rank, expected in enumerate(listed(*plan)):
        src, place = jax.jit(sources, static_argnums=2)(plan, rank, int(counts[0].sum()))
        assert list(zip(src.tolist(), place.tolist(), strict=True)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_the_list(kind):
    counts, plan = example(kind)
    R, rows = counts.shape[0], counts[0].sum()
    src, dst = np.meshgrid(np.arange(R), np.arange(R), indexing="ij")
    found = jax.tree.map(np.asarray, jax.jit(pieces)(plan, src, dst))
    actual = np.full((R, rows, 2), -1)
    for s, r, g in np.ndindex(found.size.shape):
        for i in range(found.size[s, r, g]):
            assert (actual[r, found.destination[s, r, g] + i] == -1).all()
            actual[r, found.destination[s, r, g] + i] = s, found.source[s, r, g] + i
    np.testing.assert_array_equal(actual, listed(*plan))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_go_home_by_turns_that_fill_the_donor_and_no_more(kind):
    R, E = 8, 32
    plan = make_plan(jnp.asarray(counts_of(whole(loads(kind, R, E, np.random.default_rng(2)), R, 64), R)))
    number, turns = jax.tree.map(np.asarray, jax.jit(pieces_home)(plan))
    lent, donor = np.asarray(plan.lent()), np.asarray(plan.donor)
    queues = [np.sort(number[donor == d][lent[donor == d]]) for d in range(R)]
    assert all((queue == np.arange(len(queue))).all() for queue in queues)
    assert turns == -(-max(map(len, queues)) // (E // R))
