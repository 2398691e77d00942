"""The pipeline's timetable, played with names instead of numbers: what is read is what should lie there."""

import numpy as np
import pytest

from k3_jax.parallel.schedule import IDLE, Schedule

SHAPES = [  # ranks, chunks each, micro-batches, rows before each stage, rows in all
    (2, 1, 1, (0, 4), 8),
    (2, 1, 5, (0, 1), 2),
    (3, 1, 4, (0, 2, 5), 8),
    (8, 1, 16, tuple(range(8)), 8),
    (8, 1, 3, tuple(range(8)), 8),
    (4, 2, 16, tuple(range(8)), 8),
    (4, 2, 7, tuple(range(8)), 8),
    (2, 4, 9, tuple(range(8)), 8),
    (2, 2, 6, (0, 1, 3, 5), 6),
    (3, 3, 5, (0, 1, 2, 4, 5, 6, 9, 10, 11), 14),
]
schedules = pytest.mark.parametrize("schedule", [Schedule(*shape) for shape in SHAPES], ids=str)


def neighbours(messages, links_of):
    """Per rank what arrives: row i of a message goes over the links of i."""
    arrived = [[None] * len(messages[0]) for _ in messages]
    for i in range(len(messages[0])):
        for a, b in links_of(i):
            arrived[b][i] = messages[a][i]
    return arrived


@schedules
def test_forward_passes_read_their_rows(schedule):
    """Every stage runs once per micro-batch, after the one before it, and its rows stay until its backward pass."""
    P, pool, arrived, done = schedule.pipe, {}, None, set()
    nothing = [None] * schedule.message
    for tick in range(schedule.ticks):
        messages = []
        for p in range(P):
            table, stages = schedule.forward, []
            m, stage = int(table.micro_batch[tick, p]), int(table.chunk[tick, p]) * P + p
            if m == IDLE:
                messages.append(nothing)
            else:
                first = schedule.first_rows[stage]
                come = [(m, 0)] + nothing[1:] if stage == 0 else arrived[p]
                for i in range(schedule.num_fresh(stage)):
                    pool[p, table.fresh[tick, p, i]] = come[i]
                assert [pool[p, s] for s in table.rows[tick, p, : first + 1]] == [(m, row) for row in range(first + 1)]
                assert (m, stage) not in done
                assert stage == 0 or (m, stage - 1) in done
                stages.append((m, stage))
                last = stage == P * schedule.interleave - 1
                out = schedule.num_rows if last else schedule.first_rows[stage + 1]
                messages.append([(m, out - i) if out >= i else None for i in range(schedule.message)])
            table = schedule.backward
            m, stage = int(table.micro_batch[tick, p]), int(table.chunk[tick, p]) * P + p
            if m != IDLE:
                first = schedule.first_rows[stage]
                assert (m, stage) in done or stages == [(m, stage)]
                assert [pool[p, s] for s in table.rows[tick, p, : first + 1]] == [(m, row) for row in range(first + 1)]
            done |= set(stages)
        arrived = neighbours(messages, schedule.links)
    assert len(done) == schedule.micro_batches * P * schedule.interleave


@schedules
def test_every_reader_of_a_row_is_heard_where_it_was_made(schedule):
    """A row's cotangent gathers all later stages, each once, on its way back to the stage that made it."""
    P, V, returns, arrived = schedule.pipe, schedule.interleave, {}, None
    last, done = P * V - 1, set()
    for tick in range(schedule.ticks):
        messages = []
        for p in range(P):
            table = schedule.backward
            m, stage = int(table.micro_batch[tick, p]), int(table.chunk[tick, p]) * P + p
            if m == IDLE:
                messages.append([None] * schedule.message)
                continue
            first = schedule.first_rows[stage]
            wanted = {row: {stage} for row in range(first + 1)}
            assert stage == last or (m, stage + 1) in done
            if stage < last:
                after = schedule.first_rows[stage + 1]
                for i in range(schedule.num_fresh(stage + 1)):
                    row, heard = after - i, arrived[p][i]
                    if row > first:
                        assert heard == set(range(stage + 1, last + 1))
                    else:
                        assert not wanted[row] & heard
                        wanted[row] |= heard
            message = []
            for i in range(schedule.message):
                slot = table.collected[tick, p, i]
                heard = wanted.get(first - i, set())
                if slot < schedule.returns:
                    added = returns.pop((p, slot))
                    assert {x for x in added if isinstance(x, tuple)} == {(m, first - i)}
                    heard = heard | (added - {(m, first - i)})
                message.append(heard)
            for row, slot in enumerate(table.returned[tick, p]):
                if slot < schedule.returns:
                    returns[p, slot] = returns.get((p, slot), set()) | {*wanted[row], (m, row)}
            messages.append(message)
            done.add((m, stage))
        arrived = neighbours(messages, lambda i: [(b, a) for a, b in schedule.links(i)])
    assert len(done) == schedule.micro_batches * P * V
    assert not returns


@schedules
def test_rests_and_rooms(schedule):
    """P - 1 idle passes each way; rooms do not grow with the number of micro-batches."""
    P, V, M = schedule.pipe, schedule.interleave, schedule.micro_batches
    full = -(-M // P) * P * V
    for passes in (schedule.forward, schedule.backward):
        assert np.count_nonzero((passes.micro_batch != IDLE).any(1)) <= full + P - 1
        assert (np.count_nonzero(passes.micro_batch != IDLE, axis=0) == M * V).all()
    if M % P == 0:
        assert schedule.bubble() == pytest.approx((P - 1) / (M * V + P - 1))
        more = Schedule(P, V, 4 * M, schedule.first_rows, schedule.num_rows)
        if M >= 2 * P:
            assert (more.pool, more.returns) == (schedule.pool, schedule.returns)
    assert schedule.in_flight().max() <= (2 * P - 1 if V == 1 else (V + 1) * P)
