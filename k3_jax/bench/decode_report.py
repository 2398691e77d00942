"""The table and the picture of `k3 bench decode --topology`."""

from typing import Any

from k3_jax.bench import report

CAVEATS = """\
Predicted, not measured: no part of this has run on a TPU. Copies from HBM at 3.05 TB/s per core, one after the other;
an exchange of ranks takes 4 us, or its bytes on the links at 134 GB/s; arithmetic takes its bundles at 1.43 per ns.
These are published figures of other kernels. Latency of single copies, skew of ranks and dispatch are left out. What is
claimed is the ratio to the published kernel under one model, of which two constants are fitted to its throughput at
batch 1 and 8."""


def text(x: dict[str, Any]) -> str:
    title = f"{x['config']} on {x['topology']}, batch {x['batch']}, {x['context']} tokens in every row"
    parts = [title, report.columns(_facts(x)), report.columns(_stages(x)), report.columns(_sensitivity(x))]
    if x["published"]:
        parts.append(report.columns(_published(x["published"])))
    parts += [_extra(x), report.columns(_bars(x)), CAVEATS]
    return "\n\n".join(part for part in parts if part)


def _facts(x: dict[str, Any]) -> list[tuple[str, str]]:
    phases, ms = x["collective_phases_per_layer"], x["predicted_step_ms"]
    waits = f"arithmetic {ms['compute']:.2f}, waits for exchanges {ms['exchanges']:.2f}, for HBM {ms['hbm']:.2f}"
    fits = "fits" if x["prefill_fits"] else "does not fit"
    return [
        ("predicted tokens/s", f"{x['predicted_tokens_per_s']:.0f}"),
        ("predicted step, ms", f"{ms['now']:.2f}: {waits}"),
        ("roofline tokens/s", f"{x['roofline_tokens_per_s']:.0f}"),
        ("HBM per core, GiB", f"{x['hbm_gib_per_core']:.2f}"),
        ("VMEM per core, MiB", f"{x['vmem_mib_per_core']:.2f}"),
        ("kernel calls per step", f"{x['pallas_calls_per_step']}"),
        ("exchanges per layer, KDA / MLA", f"{phases['kda']} / {phases['mla']}"),
        ("weight-sized copies", f"{x['weight_sized_copies']}"),
        ("bytes per step, over the least", f"{x['bytes_per_step'] / 1e9:.1f} GB, {x['bytes_over_minimum']:.3f}"),
        ("busiest rank over the mean", f"{x['max_rank_over_mean']:.2f}"),
        ("copies of the weights", f"{x['weight_copies']} ({x['weight_bytes_over_model']:.3f} of their bytes)"),
        (
            "prefill of 8,192 tokens beside it",
            f"{fits}: {x['prefill']['gib_per_core']:.1f} GiB (counted, not compiled)",
        ),
        ("static bundles", f"{x['static_bundles']:,}"),
    ]


def _stages(x: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [(s["name"], f"{s['bundles']:,}", f"{s['dma_bytes'] / 1e6:.2f}") for s in x["stages"]]
    return [("stage, executed once", "bundles", "HBM MB"), *rows]


def _sensitivity(x: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [("predicted, exchange of", "tokens/s", "published kernel", "ratio")]
    for s in x["sensitivity"]:
        theirs = (f"{s['published_tokens_per_s']:.0f}", f"{s['ratio']:.2f}") if "ratio" in s else ("-", "-")
        rows.append((f"{s['phase_us']:.1f} us", f"{s['tokens_per_s']:.0f}", *theirs))
    return rows


def _published(x: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [("published kernel, batch", "measured tokens/s", "model", "error")]
    for batch, measured in x["measured_tokens_per_s"].items():
        model = x["model_tokens_per_s"][batch]
        error = f"{100 * (model / measured - 1):+.1f} %"
        rows.append(
            (f"{batch}", f"{measured:.0f}", f"{model:.0f}", error if batch in x["held_out_error"] else "fitted")
        )
    return rows


def _extra(x: dict[str, Any]) -> str:
    lines = []
    if v := x.get("verification"):
        lines.append(
            f"speculation, predicted: 8 rows in {v['verify_ms']:.2f} ms and a draft of {v['draft_ms']:.2f} ms "
            f"({v['draft_phases']} exchanges, its weights once): {v['predicted_tokens_per_s']:.0f} tokens/s if "
            f"{v['acceptance']} are accepted; published 709, measured"
        )
    if b := x.get("baseline_mla"):
        lines.append(
            f"MLA in all layers but the first, predicted: {b['predicted_tokens_per_s']:.0f} tokens/s, "
            f"{b['slower']:.2f} times slower, {b['model_bytes_ratio']:.3f} of the bytes"
        )
    return "\n".join(lines)


def _bars(x: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [(b["name"], f"{b['value']:.2f}", b["bar"], "met" if b["met"] else "MISSED") for b in x["bars"]]
    return [("bar", "", "expected", ""), *rows]


def draw(x: dict[str, Any], place: str) -> None:
    """Where the time goes, and tokens per second for every latency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    parts = ("compute", "exchanges", "hbm")
    bars = left.bar(("arithmetic", "exchanges", "HBM"), [x["predicted_step_ms"][name] for name in parts])
    left.bar_label(bars, fmt="%.2f")
    left.set_ylabel("ms of a step, predicted")
    latencies = [s["phase_us"] for s in x["sensitivity"]]
    right.plot(latencies, [s["tokens_per_s"] for s in x["sensitivity"]], marker="o", label="ours")
    if x["published"]:
        theirs = [s["published_tokens_per_s"] for s in x["sensitivity"]]
        right.plot(latencies, theirs, marker="o", label="published, same model")
    right.set_xlabel("us per exchange")
    right.set_ylabel("tokens/s, predicted")
    right.set_ylim(bottom=0)
    right.legend()
    figure.suptitle(f"{x['config']}, {x['topology']}, batch {x['batch']}", fontsize="medium")
    figure.savefig(place, dpi=150)
