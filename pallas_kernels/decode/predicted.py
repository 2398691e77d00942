"""Tokens per second of a decode step under the model of time, beside the published kernel's under the same."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_kernels.decode import published
from pallas_kernels.decode.ledger import padded_bytes
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.stages import StageBundles, StepProgram
from pallas_kernels.decode.timeline import Fetch, Instruction, Rates, Send, Times, Wait, play

RATES = Rates()
PHASES_US = (3.0, 3.5, 4.0, 5.0, 8.0)
# The published draft (DSpark): bfloat16 weights, five layers of two sums, eight tokens chosen one after the other.
DRAFT_BYTES, DRAFT_SUMS, DRAFT_TOKENS = 6.96e9, 10, 8


def predictions(plan: Plan, bundles: dict[str, StageBundles], context: int) -> dict[str, Any]:
    """Under the model of time: ours, and for K3 on 32 cores the published kernel's."""
    rows = plan.config.rows
    times = {us: step_times(plan, bundles, context, _rates(us)) for us in PHASES_US}
    now = times[RATES.phase * 1e6]
    found: dict[str, Any] = {
        "predicted_tokens_per_s": rows / now.now,
        "predicted_step_ms": {name: 1e3 * getattr(now, name) for name in ("now", "compute", "exchanges", "hbm")},
        "constants": {
            "phase_us": RATES.phase * 1e6,
            "hbm_tb_per_s_per_core": RATES.hbm / 1e12,
            "bundles_per_ns": RATES.bundles / 1e9,
            "links_gb_per_s_per_core": RATES.links / 1e9,
            "ring_mib": padded_bytes(plan.buffers["banks"]) / 2**20,
        },
        "sensitivity": [{"phase_us": us, "tokens_per_s": rows / x.now} for us, x in times.items()],
    }
    if rows == DRAFT_TOKENS:
        found["verification"] = verification(plan, now)
    if _is_k3(plan) and context <= published.CONTEXT:
        return found | _published(rows, found["sensitivity"])
    return found | {"predicted_published_tokens_per_s": None, "published": None}


def step_times(plan: Plan, bundles: dict[str, StageBundles], context: int, rates: Rates = RATES) -> Times:
    return play(StepProgram(plan, bundles, rates, context), rates)


def _rates(phase_us: float) -> Rates:
    return dataclasses.replace(RATES, phase=phase_us * 1e-6)


def _is_k3(plan: Plan) -> bool:
    """The model and the slice of the published kernel."""
    c = plan.config
    return (len(c.layers), c.hidden, c.moe.experts, c.ranks) == (93, published.D, published.EXPERTS, 32)


def _published(rows: int, sensitivity: list[dict[str, float]]) -> dict[str, Any]:
    """The published kernel under the same model; adds its figure and the ratio to each line of `sensitivity`."""
    fitted = published.fit(RATES)
    predict = lambda batch, rates: batch / published.step_seconds(batch, fitted, rates)  # noqa: E731
    for line in sensitivity:
        theirs = predict(rows, _rates(line["phase_us"]))
        line |= {"published_tokens_per_s": theirs, "ratio": line["tokens_per_s"] / theirs}
    most, mean = published.busiest(rows, published.GROUPS)
    model = {batch: predict(batch, RATES) for batch in published.TOKENS_PER_SECOND}
    return {
        "predicted_published_tokens_per_s": predict(rows, RATES),
        "published": {
            "measured_tokens_per_s": published.TOKENS_PER_SECOND,
            "speculative": published.SPECULATIVE,
            "roofline_tokens_per_s": published.ROOFLINE,
            "max_rank_over_mean": most / mean,
            "fitted": {"layer_us": 1e6 * fitted.layer, "row_us": 1e6 * fitted.row, "on_batches": published.FITTED},
            "model_tokens_per_s": model,
            "held_out_error": {b: model[b] / published.TOKENS_PER_SECOND[b] - 1 for b in published.HELD_OUT},
        },
    }


def verification(plan: Plan, verify: Times) -> dict[str, float]:
    """Eight rows as if of one sequence, and a draft before them: its weights once, every sum in two exchanges, one
    exchange per token and one for what was accepted. A draft of ours does not exist; its arithmetic is left out."""
    phases = 2 * DRAFT_SUMS + DRAFT_TOKENS + 1
    draft = play(_draft(DRAFT_BYTES / plan.config.ranks, phases), RATES)
    total, accepted = verify.now + draft.now, published.SPECULATIVE["acceptance"]
    return {
        "verify_ms": 1e3 * verify.now,
        "draft_ms": 1e3 * draft.now,
        "draft_phases": phases,
        "acceptance": accepted,
        "predicted_tokens_per_s": accepted / total,
    }


def _draft(size: float, phases: int) -> Iterator[Instruction]:
    yield Fetch("weights", size)
    yield Wait("weights")
    for i in range(phases):
        yield from (Send(i, 0), Wait(i))
