"""The plan of a training step on a TPU pod, at three depths: from the configuration, lowered, compiled."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from rich.table import Table

from k3_jax import audit
from k3_jax.config import ConfigError, RunConfig
from k3_jax.plan.compiled import CompiledStep, compile_step, lower
from k3_jax.plan.flows import Flow, flows, unlisted
from k3_jax.plan.ledger import KNOBS, Ledger, make_ledger
from k3_jax.plan.pod import Pod, pod
from k3_jax.plan.tables import new_table, size
from k3_jax.plan.work import Work, step_work
from k3_jax.train.optimizer import describe
from k3_jax.train.setup import check_run

UNCALIBRATED = "predicted, uncalibrated"


@dataclass(frozen=True)
class Bracket:
    """Seconds of a step at the chip's peak and at the links' bandwidths, by how much of the two overlaps."""

    compute: float
    transfer: float
    scheduled: float | None  # None: nothing was compiled

    def seconds(self) -> dict[str, float]:
        found = {"no overlap": self.compute + self.transfer, "full overlap": max(self.compute, self.transfer)}
        return found if self.scheduled is None else found | {"as scheduled": self.scheduled}


@dataclass(frozen=True)
class TrainingPlan:
    run: RunConfig
    pod: Pod
    ledger: Ledger
    flows: list[Flow]
    work: Work
    lowered_seconds: float | None
    compiled: CompiledStep | None

    def bracket(self) -> Bracket:
        mesh, chip = self.pod.mesh(self.run.mesh).shape, self.pod.chip
        compute = self.work.executed / self.pod.devices / chip.bf16_flops
        transfer = sum(flow.seconds(chip, mesh) for flow in self.flows)
        if self.compiled is None:
            return Bracket(compute, transfer, None)
        found = self.compiled.schedule
        return Bracket(found.compute, found.transfer, found.now)

    def utilisation(self, seconds: float) -> float:
        """MFU of a step that takes so long."""
        return self.work.model / self.pod.devices / self.pod.chip.bf16_flops / seconds

    @property
    def strangers(self) -> list[tuple[str, tuple[str, ...]]]:
        """Kinds and axes of the compiled step's collectives that the flows do not list."""
        if self.compiled is None:
            return []
        return sorted({(x.kind, x.axes) for x in unlisted(self.compiled.collectives, self.flows)})


def plan_training(run: RunConfig, topology: str, lowered: bool, effort: str | None) -> TrainingPlan:
    """`effort`: compile at this optimization level; None: do not. Raises ConfigError for what cannot be."""
    place = pod(topology)
    mesh = place.mesh(run.mesh)
    if mesh.shape["pipe"] > 1:
        raise ConfigError(f"mesh.pipe = {mesh.shape['pipe']}: expected 1 (the ledger does not know pipelines yet)")
    check_run(run, mesh, init=None)
    with jax.sharding.use_abstract_mesh(mesh):
        model = audit.abstract_model(run.model)
    shapes = audit.parameter_shapes(model)
    ledger = make_ledger(run, place, model)
    work = step_work(run, shapes, describe(run.optimizer, run.model, shapes))
    try:
        compiled = compile_step(run, place, effort) if effort else None
    except ConfigError as error:
        raise ConfigError(f"{error}; {advice(ledger)}") from error
    seconds = compiled.lower_seconds if compiled else lower(run, place)[1] if lowered else None
    return TrainingPlan(run, place, ledger, flows(run, place, model), work, seconds, compiled)


def advice(ledger: Ledger) -> str:
    """The largest items and the first knob to turn."""
    items = ledger.largest[:3]
    named = ", ".join(f"{item.group} {item.name} {size(item.bytes)}" for item in items)
    return f"the largest items of the ledger: {named}; first: {KNOBS[items[0].group]}"


def as_json(plan: TrainingPlan) -> dict[str, Any]:
    ledger, seconds = plan.ledger, plan.bracket().seconds()
    found = {
        "topology": plan.pod.topology,
        "chips": plan.pod.chips,
        "devices": plan.pod.devices,
        "tokens_per_step": plan.work.tokens,
        "ledger": dataclasses.asdict(ledger)
        | {"argument_bytes": ledger.argument_bytes, "temporary_bytes": ledger.temporary_bytes}
        | {
            "peak_bytes": ledger.peak_bytes,
            "hbm_bytes": plan.pod.chip.program_hbm_bytes,
            "by_group": ledger.by_group(),
        },
        "collectives": [dataclasses.asdict(flow) for flow in plan.flows],
        "work": dataclasses.asdict(plan.work),
        "seconds": seconds,
        "utilisation": {name: plan.utilisation(x) for name, x in seconds.items()},
    }
    if plan.lowered_seconds is not None:
        found["lower_seconds"] = plan.lowered_seconds
    if plan.compiled:
        found["compiled"] = _compiled_json(plan)
    return found


def _compiled_json(plan: TrainingPlan) -> dict[str, Any]:
    step = plan.compiled
    return {
        "argument_bytes": step.argument_bytes,
        "temporary_bytes": step.temporary_bytes,
        "code_bytes": step.code_bytes,
        "compile_seconds": step.compile_seconds,
        "host_bytes": step.host_bytes,
        "collectives": [[kind, list(axes), sent] for (kind, axes), sent in sorted(step.sent().items())],
        "exposed_bytes": dict(step.schedule.bare),
        "unlisted": plan.strangers,
    }


def tables(plan: TrainingPlan) -> list[Table]:
    return [_memory_table(plan), _traffic_table(plan), _time_table(plan)]


def _memory_table(plan: TrainingPlan) -> Table:
    ledger, hbm = plan.ledger, plan.pod.chip.program_hbm_bytes
    where = f"{plan.pod.topology}, {plan.pod.chips:,} chips, {plan.pod.devices:,} devices"
    table = new_table(f"{plan.run.name}: bytes on each of the devices of {where}", "item", "bytes", "compiled")
    for group, total in ledger.by_group().items():
        table.add_row(group, size(total))
        for item in sorted((x for x in ledger.largest if x.group == group), key=lambda x: -x.bytes)[:4]:
            table.add_row(f"  {item.name}", size(item.bytes))
    table.add_section()
    step = plan.compiled
    table.add_row("arguments", size(ledger.argument_bytes), size(step.argument_bytes) if step else "")
    table.add_row(
        f"temporaries: {ledger.moment}", size(ledger.temporary_bytes), size(step.temporary_bytes) if step else ""
    )
    peak = step.argument_bytes + step.temporary_bytes if step else ledger.peak_bytes
    table.add_row("peak", size(ledger.peak_bytes), size(peak) if step else "")
    table.add_row(f"HBM for a program: {'it fits' if peak < hbm else 'IT DOES NOT FIT'}", size(round(hbm)))
    if peak >= hbm:
        table.caption = advice(ledger)
    return table


def _traffic_table(plan: TrainingPlan) -> Table:
    mesh, chip = plan.pod.mesh(plan.run.mesh).shape, plan.pod.chip
    table = new_table("what a device sends in a step", "collective", "axes", "what", "bytes", "seconds", text_columns=3)
    for flow in sorted(plan.flows, key=lambda flow: -flow.bytes):
        row = flow.kind, " ".join(flow.axes), flow.what, size(round(flow.bytes)), f"{flow.seconds(chip, mesh):.3f}"
        table.add_row(*row)
    if plan.compiled:
        table.add_section()
        for (kind, axes), total in sorted(plan.compiled.sent().items()):
            table.add_row(kind, " ".join(axes), "compiled", size(total))
        for kind, total in sorted(plan.compiled.schedule.bare.items()):
            table.add_row(kind, "", "compiled: under no product", size(round(total)))
        for kind, axes in plan.strangers:
            table.add_row(kind, " ".join(axes), "NOT IN THE PLAN")
    return table


def _time_table(plan: TrainingPlan) -> Table:
    work, bracket = plan.work, plan.bracket()
    table = new_table(f"time of a step of {work.tokens:,} tokens ({UNCALIBRATED})", "quantity", "value")
    table.add_row("operations of the model, analytic", f"{work.model:.4g}")
    table.add_row("executed: recomputation and Muon too", f"{work.executed:.4g}")
    table.add_row("at the peak of the matrix units, or of HBM where compiled", f"{bracket.compute:.2f} s")
    table.add_row("transfers", f"{bracket.transfer:.2f} s")
    for name, seconds in bracket.seconds().items():
        table.add_row(f"step, {name}", f"{seconds:.2f} s, MFU {100 * plan.utilisation(seconds):.1f} %")
    if plan.compiled:
        step = plan.compiled
        took = f"{step.compile_seconds / 60:.1f} min, {size(step.host_bytes)}"
        table.add_row("lowered, compiled on this machine (measured)", f"{step.lower_seconds:.0f} s, {took}")
    elif plan.lowered_seconds is not None:
        table.add_row("lowered on this machine (measured)", f"{plan.lowered_seconds:.0f} s")
    return table
