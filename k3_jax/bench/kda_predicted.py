"""Kimi Delta Attention for a TPU that is not there: compiled ahead of time, and what the static schedule predicts."""

import sys

from k3_jax.bench import kda_tpu_peers, report
from k3_jax.config import ConfigError
from pallas_kernels.common.dump import DumpError
from pallas_kernels.common.schedule import Schedule, schedule_of, table_of
from pallas_kernels.kda.bench import Case, compulsory_bytes, operations

Summary = dict[str, float | None]
Summaries = dict[str, Summary]  # by direction
SLOTS = {"MXU": "MXU", "VALU": "VALU", "load": "VLOAD", "store": "VSTORE", "fill": "FILL", "spill": "SPILL"}
CAVEATS = """\
Predicted, not measured: the bundles of the final schedule at 1.43 per ns (a rate for TPU7x: of five published points
three fit within 3 %, one ran 10 % slower and one 2x), or the HBM traffic at full bandwidth, whichever takes longer.
Not in it: waiting for DMAs, the overhead of grid steps, conflicts of banks, results of the matrix unit that come later
than scheduled. What SparseCores relay out counts as HBM traffic only. Traffic is operands and results, once per call,
without padding. Shares are of slots in the steady steps of the Pallas calls, or of everything where there are none;
fills and spills are among loads and stores. Regions that a flag in a scalar-prefetch table guards are not counted."""


def run(case: Case, topology: str, implementation: str, peers: bool, plot: str | None, json_place: str | None) -> int:
    schedules = {}
    for backward, direction in enumerate(report.DIRECTIONS):
        report.progress(f"{direction}: compiling for {topology}, which may take minutes")
        try:
            schedules[direction] = _schedule(case, topology, implementation, bool(backward))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except DumpError as error:
            print(f"k3 bench kda: {direction} does not compile for {topology}: {error}", file=sys.stderr)
            return 1
    numbers = {direction: summary(schedule, case.token_heads) for direction, schedule in schedules.items()}
    text = [f"{implementation} on one device of {topology}, {case}"]
    text += [_text(direction, schedule, case) for direction, schedule in schedules.items()]
    others = _peers(case, topology) if peers else {}
    everybody = {"k3_jax": numbers, **others}
    if peers:
        text.append(
            f"{_side_by_side(everybody)}\n(the others from the gate's logits in bfloat16, as ours with --raw-gate)"
        )
        numbers = numbers | {"peers": others}
    if plot:
        draw(everybody, f"{case} on {topology}, predicted", plot)
    report.publish(json_place, {"shape": case.sizes, **numbers}, "\n\n".join([*text, CAVEATS]))
    return 0


def _peers(case: Case, topology: str) -> dict[str, Summaries]:
    """The same of every public kernel that is installed and supports the chip."""
    found: dict[str, Summaries] = {}
    for name in kda_tpu_peers.installed():
        for backward in (False, True)[: 1 + kda_tpu_peers.PEERS[name].backward]:
            direction = report.DIRECTIONS[backward]
            report.progress(f"{direction} of {name}: compiling for {topology}, which may take minutes")
            try:
                schedule = schedule_of(
                    "k3_jax.bench.kda_tpu_peers:lower", table=kda_tpu_peers.TABLE, topology=topology,
                    shape=list(case.sizes.values()), peer=name, backward=backward,
                )  # fmt: skip
            except (ValueError, DumpError) as error:
                print(f"k3 bench kda: {direction} of {name} does not compile for {topology}: {error}", file=sys.stderr)
                continue
            found.setdefault(name, {})[direction] = summary(schedule, case.token_heads)
    return found


def _side_by_side(everybody: dict[str, Summaries]) -> str:
    rows = [report.PREDICTED]
    for name, summaries in everybody.items():
        rows += [report.predicted_row(f"{direction} {name}", x) for direction, x in summaries.items()]
    return report.columns(rows)


def draw(everybody: dict[str, Summaries], title: str, place: str) -> None:
    """Bars of bundles per token and head."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for i, direction in enumerate(report.DIRECTIONS):
        bars = [
            (at + 0.4 * i, x[direction]["bundles_per_token_head"])
            for at, x in enumerate(everybody.values())
            if direction in x
        ]
        drawn = axes.bar(*zip(*bars, strict=True), width=0.4, label=direction.replace("_", " + "))
        axes.bar_label(drawn, fmt="%.2f")
    axes.set_xticks([at + 0.2 for at in range(len(everybody))], list(everybody))
    axes.set_ylabel("bundles per token and head")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    figure.savefig(place, dpi=150)


def _schedule(case: Case, topology: str, implementation: str, backward: bool) -> Schedule:
    return schedule_of(
        "pallas_kernels.kda.bench:lower", table=0, topology=topology, shape=list(case.sizes.values()), dtype=case.dtype,
        segments=list(case.segments), implementation=implementation, backward=backward, raw_gate=case.raw_gate,
    )  # fmt: skip


def summary(schedule: Schedule, token_heads: int) -> Summary:
    """The numbers of one program, XLA's ops included."""
    seconds = schedule.predicted_seconds
    return {
        "bundles_per_token_head": schedule.work.bundles / token_heads,
        "hbm_mb": schedule.hbm_bytes / 1e6,
        "spill_share": schedule.steady.share("SPILL"),
        "fill_share": schedule.steady.share("FILL"),
        "mxu_share": schedule.steady.share("MXU"),
        "predicted_ms": None if seconds is None else 1e3 * seconds,
    }


def _text(direction: str, schedule: Schedule, case: Case) -> str:
    chip, backward = schedule.chip, direction == report.DIRECTIONS[1]
    least, count = compulsory_bytes(case, backward), operations(case, backward)
    numbers = summary(schedule, case.token_heads)
    predicted = numbers["predicted_ms"]
    traffic, floor = (f"{1e3 * size / chip.hbm_bandwidth:.3f} ms" for size in (schedule.hbm_bytes, least))
    rows = [
        ("predicted", f"no calibration for {chip.name}" if predicted is None else f"{predicted:.3f} ms"),
        ("bundles per token and head", f"{numbers['bundles_per_token_head']:.2f}"),
        *((f"{name} share", f"{100 * schedule.steady.share(slot):.1f} %") for name, slot in SLOTS.items()),
        ("HBM bytes per token and head", f"{schedule.hbm_bytes / case.token_heads:.0f}"),
        (f"HBM traffic, {schedule.hbm_bytes / 1e6:.0f} MB", traffic),
        ("roofline: HBM, arguments and results once", floor),
        ("roofline: matrix products", f"{1e3 * count / chip.bf16_flops:.3f} ms"),
        ("operations per byte (ridge)", f"{count / least:.0f} ({chip.ridge:.0f})"),
    ]
    return f"{direction}\n{report.columns(rows)}\n\n{table_of(schedule)}"
