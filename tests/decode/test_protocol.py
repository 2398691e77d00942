"""The static check passes the kernel, and finds each mistake that is made in it on purpose."""

import dataclasses

import pytest
from jax import lax
from jax.experimental import pallas as pl

from k3_jax.recipe import load_recipe
from k3_jax.serve.pack import decode_config
from pallas_kernels.decode import Plan, Slots, channels, core, kda, mla
from pallas_kernels.decode.collectives import Links
from pallas_kernels.decode.follow import Access, Place, Signal, Start, Wait
from pallas_kernels.decode.protocol import ProtocolError, play, trace
from pallas_kernels.decode.ring import Ring
from tests.decode.model import kernel_config, model_config
from tests.kernels.mutation import replace


def events(layers=5, **changes):
    """Rows at the first token, at the end of a tile, and idle."""
    plan = Plan(kernel_config(model_config(layers), rows=3, **changes))
    return trace(plan, (0, 31, -1))


@pytest.mark.slow
def test_the_kernel_passes():
    play(events(layers=13))


def test_with_a_cut_cache_and_sums_in_slices():
    play(events(layers=13, cache_ranks=4, blocks={"whole_sum_bytes": 0}))


def chained():
    """Two rows of one sequence over the end of a tile, an idle one, and another sequence that leaves its state where
    the first one's came from."""
    plan = Plan(kernel_config(model_config(5), rows=4, slots=5))
    return trace(plan, (15, 16, -1, 40), Slots((2, -1, -1, 4), (0, 1, 3, 2), (2, 2, 2, 4)))


def test_rows_of_one_sequence():
    play(chained())


@pytest.mark.slow
def test_a_state_that_is_awaited_and_never_sent(monkeypatch):
    always = {"pl.when(core.slots.entry[row] >= 0)": "pl.when((core.slots.entry[row] >= 0) | (act is WAIT))"}
    replace(monkeypatch, kda._load, always)
    with pytest.raises(ProtocolError, match="all wait for ever"):
        play(chained())


@pytest.mark.slow
def test_a_state_that_leaves_before_the_rows_are_done(monkeypatch):
    """The store of a layer that begins before its rows write to its place in VMEM."""
    early = {"    _take_turns(core, number)\n": "    _take_turns(core, number)\n    _store(core, number, START)\n"}
    replace(monkeypatch, kda.mixer, {**early, "    _store(core, number, START)\n    o =": "    o ="})
    with pytest.raises(ProtocolError, match="written while a copy from it is on its way"):
        play(chained())


@pytest.mark.slow
def test_two_and_eight_ranks():
    for ranks in (2, 8):
        plan = Plan(
            kernel_config(model_config(5, ranks), ranks=ranks, cache_ranks=ranks, capacity=128, blocks={"banks": 2})
        )
        play(trace(plan, (0, 100)))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"cache_ranks": 32, "capacity": 2**20}], ids=["whole-cache", "cut-cache"])
def test_k3_on_32_cores(changes):
    """Its first five layers, which are of every kind."""
    config = decode_config(load_recipe("configs/k3.py").model, **({"ranks": 32, "rows": 1, "capacity": 2048} | changes))
    play(trace(Plan(dataclasses.replace(config, layers=config.layers[:5])), (700,)))


def no_barrier(patch):
    patch.setattr(Links, "barrier", lambda self: None)
    return "may not have entered the kernel"


def a_wait_dropped(patch):
    replace(patch, mla._finish_down, {'    links.finish("mla_down")\n': ""})
    return "may still use it|while a copy to it is on its way"


def a_wait_too_many(patch):
    once = Links.finish

    def twice(self, name):
        once(self, name)
        return once(self, name)

    patch.setattr(Links, "finish", twice)
    return "all wait for ever"


def a_bank_refilled_early(patch):
    wait, release = Ring._await, Ring._release

    def early(self, piece, start):
        wait(self, piece, start)
        release(self, piece, start)

    patch.setattr(Ring, "_await", early)
    patch.setattr(Ring, "_release", lambda self, piece, start: None)
    return "used while a copy to it is on its way"


def one_buffer_for_two_sums(patch):
    """Of a mixer and of the dense layer behind it."""
    source = {'start_sum("dense_sum"': 'start_sum("mixer_sum"', 'finish_sum("dense_sum"': 'finish_sum("mixer_sum"'}
    replace(patch, channels.dense, source)
    return "may still use it|used while a copy to it is on its way|another copy to it"


def the_wrong_place_of_two(patch):
    def load(self, name, index):
        return before(self, name, index + 1) if name == "vectors" else before(self, name, index)

    before = core.Core.load
    patch.setattr(core.Core, "load", load)
    return "used while a copy to it is on its way"


def the_wrong_peer(patch):
    def each(self, act):
        @pl.loop(1, self.ranks)
        def _(offset):
            act(lax.rem(self.rank + lax.rem(offset, 2), self.ranks))

    patch.setattr(Links, "_each", each)
    return "may not have entered the kernel|all wait for ever|another copy to it"


def a_store_that_nobody_awaits(patch):
    patch.setattr(kda, "finish", lambda core: None)
    return "semaphores that nobody awaits"


MISTAKES = [
    no_barrier,
    a_wait_dropped,
    a_wait_too_many,
    a_bank_refilled_early,
    one_buffer_for_two_sums,
    the_wrong_place_of_two,
    the_wrong_peer,
    a_store_that_nobody_awaits,
]


QUICK = (no_barrier, a_bank_refilled_early)


@pytest.mark.parametrize(
    "mistake", [pytest.param(f, id=f.__name__, marks=[pytest.mark.slow] * (f not in QUICK)) for f in MISTAKES]
)
def test_a_mistake_is_found(monkeypatch, mistake):
    message = mistake(monkeypatch)
    with pytest.raises(ProtocolError, match=message):
        play(events())


def test_two_ranks_that_wait_for_each_other():
    """Each sends after it has received: no count is wrong, and nobody begins."""
    one = lambda peer: [Wait((1, 0), 4), Signal((1, 0), peer, 4)]  # noqa: E731
    with pytest.raises(ProtocolError, match="all wait for ever"):
        play([one(1), one(0)])


def test_knowledge_travels_with_signals():
    """Rank 0 may write to rank 1's buffer once it knows, by way of rank 2, that rank 1 has read it."""
    buffer = Place(5, 0)
    write = Start(Place(6, 0), buffer, (1, 0), 4, peer=1, sent=(2, 0))
    told = [[Wait((3, 0), 1), write, Wait((2, 0), 4)], [Access(buffer, False), Signal((3, 0), 2, 1), Wait((1, 0), 4)]]
    play([*told, [Wait((3, 0), 1), Signal((3, 0), 0, 1)]])
    with pytest.raises(ProtocolError, match="rank 1 may not have entered|may still use it"):
        play([*told, [Signal((3, 0), 0, 1), Wait((3, 0), 1)]])
