"""Slots of a step and snapshots of a sequence, on the host: what is held, what is taken next, what is refused."""

import numpy as np
import pytest

from pallas_kernels.decode import Slots, Snapshots, independent, together
from tests.decode.model import kernel_config, model_config


def config(rows: int = 6, slots: int | None = 8):
    return kernel_config(model_config(layers=5), rows=rows, slots=slots)


def lists(slots: Slots) -> list[list[int]]:
    return [np.asarray(x).tolist() for x in slots]


def slots(*rows) -> Slots:
    return Slots(*(np.array(row, np.int32) for row in rows))


def test_rows_of_a_draft_are_chained_and_each_leaves_a_state():
    sequence = Snapshots(range(8), latent=2, tokens=20)
    assert lists(sequence.step(6)) == [[0, -1, -1, -1, -1, -1], [1, 2, 3, 4, 5, 6], [2] * 6]


def test_the_next_step_enters_from_what_was_accepted():
    sequence = Snapshots(range(8), latent=0)
    sequence.step(6)
    sequence.accept(3)
    assert sequence.tokens == 3
    assert lists(sequence.step(1)) == [[3], [4], [0]]  # slots of rejected rows are free again
    sequence.accept(1)
    sequence.rollback(2)
    assert sequence.tokens == 2
    assert lists(sequence.step(1))[0] == [2]


def test_a_step_enters_from_the_state_of_the_last_token_that_stays():
    """Every row of random steps leaves a number of its own in its slot."""
    rng, sequence = np.random.default_rng(0), Snapshots(range(5), latent=0)
    slots, path, number = {0: 0}, [0], 0  # numbers by slot; those of the tokens that stay
    returned = refused = 0
    for _ in range(300):
        count = int(rng.integers(1, 5))
        found = sequence.step(count)
        assert slots[int(found.entry[0])] == path[-1]
        numbers = range(number + 1, number + 1 + count)
        number += count
        slots |= dict(zip(found.exit.tolist(), numbers, strict=True))
        kept, back = int(rng.integers(0, count + 1)), int(rng.integers(0, 4))
        sequence.accept(kept)
        path += numbers[:kept]
        here = len(path) > back and path[-1 - back] in slots.values()
        try:
            sequence.rollback(back)
            path = path[: len(path) - back]
            returned += 1
            assert here
        except ValueError:
            refused += 1
            assert not here
        assert sequence.tokens == len(path) - 1
    assert returned > 50 and refused > 50


def test_the_oldest_states_are_given_up_first():
    sequence = Snapshots(range(3), latent=0)
    for _ in range(4):
        sequence.step(1)
        sequence.accept(1)
    with pytest.raises(ValueError, match=r"rollback\(3\): no slot holds the state after 1 tokens; .* after 2, 3, 4"):
        sequence.rollback(3)
    assert sequence.tokens == 4
    sequence.rollback(2)
    assert sequence.tokens == 2


def test_a_step_that_needs_all_slots_must_keep_a_row():
    sequence = Snapshots((4, 1), latent=1)
    assert lists(sequence.step(2)) == [[4, -1], [1, 4], [1, 1]]
    with pytest.raises(ValueError, match=r"accept\(0\): no slot holds the state after 0 tokens"):
        sequence.accept(0)
    sequence.accept(1)
    assert lists(sequence.step(1))[0] == [1]


def test_the_order_of_calls():
    sequence = Snapshots(range(4), latent=0)
    with pytest.raises(ValueError, match=r"step\(5\): expected 1 to 4 rows"):
        sequence.step(5)
    with pytest.raises(ValueError, match=r"accept\(1\): expected 0 to 0"):
        sequence.accept(1)
    sequence.step(2)
    for call in (sequence.step, sequence.rollback):
        with pytest.raises(ValueError, match=r"\(1\): expected accept\(0\) to accept\(2\) for the step before"):
            call(1)
    with pytest.raises(ValueError, match=r"accept\(3\): expected 0 to 2"):
        sequence.accept(3)
    sequence.accept(0)
    with pytest.raises(ValueError, match=r"rollback\(-1\): expected 0 or more"):
        sequence.rollback(-1)


def test_sequences_beside_each_other():
    one, other = Snapshots((0, 1, 2, 3), latent=0), Snapshots((6, 7), latent=6)
    found = together(config(), other.step(1), one.step(3))
    assert lists(found) == [[6, 0, -1, -1, -1, -1], [7, 1, 2, 3, 0, 0], [6, 0, 0, 0, 0, 0]]


def test_independent_rows():
    assert lists(independent(3)) == [[0, 1, 2]] * 3
    assert config(rows=3, slots=None).cache_slots == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (slots([0] * 7, range(7), [0] * 7), "7 rows in a step: expected at most rows = 6"),
        (slots([8], [0], [0]), r"entry = \[8\]: expected -1 to 7"),
        (slots([0], [-1], [0]), r"exit = \[-1\]: expected 0 to 7"),
        (slots([0], [0], [9]), r"latent = \[9\]: expected 0 to 7"),
        (slots([-1], [0], [0]), r"entry = \[-1\]: expected a slot for row 0"),
        (slots([0, 1], [2, 2], [0, 1]), r"exit = \[2, 2\]: expected a slot of its own"),
        (slots([0, -1], [2, 3], [0, 1]), r"latent = \[0, 1\]: expected a chained row's"),
    ],
)
def test_what_a_step_refuses(rows, message):
    with pytest.raises(ValueError, match=message):
        together(config(), rows)
