"""Rows of one sequence and roll-back: states, latents and logits are those of the sequence recomputed token by token.

What no row writes stays to the last bit, in every slot of the caches.
"""

import pytest

from tests.decode.case import Mutation
from tests.decode.rollback import SCENARIOS, Setting, run

EXACTLY = 1e-5


def check(setting: Setting) -> dict:
    outcome = run(setting)
    assert outcome["clean"], outcome["stderr"]
    assert not outcome["races"]
    assert outcome["untouched"]
    assert all(error < EXACTLY for error in outcome["errors"].values())
    return outcome


def test_draft_accept_and_roll_back():
    outcome = check(Setting("draft", layers=4, races=False))
    assert [message.partition(":")[0] for message in outcome["refused"]] == ["rollback(5)", "rollback(17)"]


SETTINGS = {
    **{name: Setting(name) for name in SCENARIOS},
    "draft-on_wait": Setting("draft", mode="on_wait"),
    "draft-cut-cache": Setting("draft", ranks=4, cache_ranks=4),
    "interleaved-on_wait": Setting("interleaved", mode="on_wait"),
    "interleaved-13-layers": Setting("interleaved", layers=13),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_scenario(setting):
    check(setting)


EXIT, LATENT = "core.slots.exit[row]", "core.caches.latent.at[number, core.slots.latent[row]"
MISTAKES = {
    "state-of-its-own-place": ("draft", Mutation("kda", "row - 1, row) if row else row", "row, row) if row else row")),
    "state-of-the-first-row": ("draft", Mutation("kda", "row - 1, row) if row else row", "0, row) if row else row")),
    "history-of-its-own-place": ("draft", Mutation("kda", "b.conv[place, origin,", "b.conv[place, row,")),
    "left-where-it-came-from": ("scattered", Mutation("kda", EXIT, "jnp.maximum(core.slots.entry[row], 0)")),
    "left-in-the-slot-of-its-row": ("scattered", Mutation("kda", EXIT, "row")),
    "an-idle-row-leaves-its-state": (
        "stopping",
        Mutation("kda", "pl.when(core.live(row))(partial(store, row))", "store(row)"),
    ),
    "latents-to-the-slot-of-the-row": (
        "scattered",
        Mutation("mla", f"target = {LATENT}", "target = core.caches.latent.at[number, row"),
    ),
    "latents-from-the-slot-of-the-row": (
        "scattered",
        Mutation("mla", f"source = {LATENT}", "source = core.caches.latent.at[number, row"),
    ),
    "before-the-latent-of-the-row-before": (
        "draft",
        Mutation("mla", "        if row:\n            _await_append(core, row - 1)\n", ""),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "mutation"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(scenario, mutation):
    outcome = run(Setting(scenario, layers=4, mode="on_wait", races=False, mutations=(mutation,)))
    assert not (outcome["untouched"] and all(error < EXACTLY for error in outcome["errors"].values()))
