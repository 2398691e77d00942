"""The plan of a training step on a TPU pod, at three depths: from the configuration, lowered, compiled."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from rich.table import Table

from k3_jax import audit
from k3_jax.config import ConfigError, RunConfig
from k3_jax.plan.bracket import UNCALIBRATED, Bracket, transfer_seconds, utilisation
from k3_jax.plan.compiled import CompiledStep, compile_step, lower
from k3_jax.plan.flows import Flow, flows, unlisted
from k3_jax.plan.ledger import KNOBS, Ledger, make_ledger
from k3_jax.plan.pod import Pod, pod
from k3_jax.plan.stages import Stages
from k3_jax.plan.tables import new_table, size
from k3_jax.plan.work import Work, step_work
from k3_jax.train.optimizer import describe
from k3_jax.train.setup import check_run
from k3_jax.train.state import new_model


@dataclass(frozen=True)
class TrainingPlan:
    run: RunConfig
    pod: Pod
    ledger: Ledger
    flows_of_ranks: list[list[Flow]]  # of the pipeline; without one there is one rank
    work: Work
    lowered_seconds: float | None
    compiled: CompiledStep | None

    @cached_property
    def mesh(self) -> dict[str, int]:
        return dict(self.pod.mesh(self.run.mesh).shape)

    @cached_property
    def fullest_rank(self) -> int:
        """Of the pipeline: the one whose transfers take longest."""
        seconds = [transfer_seconds(flows, self.pod, self.mesh) for flows in self.flows_of_ranks]
        return seconds.index(max(seconds))

    @property
    def flows(self) -> list[Flow]:
        """Of the fullest rank."""
        return self.flows_of_ranks[self.fullest_rank]

    def bracket(self) -> Bracket:
        """Of the fullest rank, at peaks."""
        stages, work = Stages.of(self.run), self.work
        executed = (work.executed - work.muon) * stages.imbalance + work.muon
        compute = executed / self.pod.devices / self.pod.chip.bf16_flops
        return Bracket(compute, transfer_seconds(self.flows, self.pod, self.mesh), stages.bubble)

    def utilisation(self, seconds: float) -> float:
        """MFU of a step that takes so long."""
        return utilisation(self.work, self.pod, seconds)

    @property
    def strangers(self) -> list[tuple[str, tuple[str, ...]]]:
        """Kinds and axes of the compiled step's collectives that the flows do not list."""
        if self.compiled is None:
            return []
        listed = [flow for flows in self.flows_of_ranks for flow in flows]
        return sorted({(x.kind, x.axes) for x in unlisted(self.compiled.collectives, listed)})


def plan_training(run: RunConfig, topology: str, lowered: bool, effort: str | None) -> TrainingPlan:
    """`effort`: compile at this optimization level; None: do not. Raises ConfigError for what cannot be."""
    place = pod(topology)
    mesh = place.mesh(run.mesh)
    run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, **mesh.shape))  # no -1 any more
    check_run(run, mesh, init=None)
    with jax.sharding.use_abstract_mesh(mesh):
        model = jax.eval_shape(lambda: new_model(run))
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
        "calibration": UNCALIBRATED,
        "bubble": Stages.of(plan.run).bubble,
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
        "seconds": step.seconds(),
        "utilisation": {name: plan.utilisation(x) for name, x in step.seconds().items()},
        "exposed": [[kind, list(axes), size] for (kind, axes), size in sorted(step.schedule.bare.items())],
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
    mesh, chip = plan.mesh, plan.pod.chip
    who = f"a device of rank {plan.fullest_rank} of the pipeline" if mesh["pipe"] > 1 else "a device"
    table = new_table(f"what {who} sends in a step", "collective", "axes", "what", "bytes", "seconds", text_columns=3)
    for flow in sorted(plan.flows, key=lambda flow: -flow.bytes):
        row = flow.kind, " ".join(flow.axes), flow.what, size(round(flow.bytes)), f"{flow.seconds(chip, mesh):.3f}"
        table.add_row(*row)
    if plan.compiled:
        table.add_section()
        for (kind, axes), total in sorted(plan.compiled.sent().items()):
            table.add_row(kind, " ".join(axes), "compiled", size(total))
        for (kind, axes), total in sorted(plan.compiled.schedule.bare.items()):
            table.add_row(kind, " ".join(axes), "compiled: exposed, under no product", size(round(total)))
        for kind, axes in plan.strangers:
            table.add_row(kind, " ".join(axes), "NOT IN THE PLAN")
    return table


def _time_table(plan: TrainingPlan) -> Table:
    work, bracket = plan.work, plan.bracket()
    table = new_table(f"time of a step of {work.tokens:,} tokens ({UNCALIBRATED})", "quantity", "value")
    table.add_row("operations of the model, analytic", f"{work.model:.4g}")
    table.add_row("executed: recomputation and Muon too", f"{work.executed:.4g}")
    table.add_row("at the peak of the matrix units", f"{bracket.compute:.2f} s")
    table.add_row("transfers", f"{bracket.transfer:.2f} s")
    if (stages := Stages.of(plan.run)).schedule:
        table.add_row("a rank rests, stages of equal cost", f"{100 * stages.bubble:.1f} %")
        table.add_row("the most expensive chunk, over the mean", f"{stages.imbalance:.3f}")
    for name, seconds in bracket.seconds().items():
        table.add_row(f"step, {name}", _with_mfu(plan, seconds))
    if plan.compiled:
        step = plan.compiled
        table.add_section()
        table.add_row("compiled: ops at the peak of the matrix units or of HBM", f"{step.schedule.compute:.2f} s")
        table.add_row("compiled: transfers", f"{step.schedule.transfer:.2f} s")
        for name, seconds in step.seconds().items():
            table.add_row(f"compiled: step, {name}", _with_mfu(plan, seconds))
        took = f"{step.compile_seconds / 60:.1f} min, {size(step.host_bytes)}"
        table.add_row("lowered, compiled on this machine (measured)", f"{step.lower_seconds:.0f} s, {took}")
    elif plan.lowered_seconds is not None:
        table.add_row("lowered on this machine (measured)", f"{plan.lowered_seconds:.0f} s")
    return table


def _with_mfu(plan: TrainingPlan, seconds: float) -> str:
    return f"{seconds:.2f} s, MFU {100 * plan.utilisation(seconds):.1f} %"
