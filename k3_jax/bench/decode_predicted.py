"""What `k3 bench decode --topology` finds: numbers of the plan, of the compiled program, and of the model of time."""

import argparse
import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_jax.bench import decode_report, report
from k3_jax.bench.decode_program import STEPS, plan_of
from k3_jax.config import ConfigError, K3Config
from k3_jax.recipe import load_recipe
from pallas_kernels.common import tpu
from pallas_kernels.common.aot import topology
from pallas_kernels.common.dump import Dump, compile_program
from pallas_kernels.decode import LayerKind, Plan, compiled, published
from pallas_kernels.decode.ledger import Ledger
from pallas_kernels.decode.stages import StageBundles, StepProgram, channel_stages, mixer_stages
from pallas_kernels.decode.timeline import Compute, Fetch, Rates, Send, Times, Wait, play

RATES = Rates()
PHASES_US = (3.0, 3.5, 4.0, 5.0, 8.0)
PREFILL_TOKENS = 8192
# The published draft (DSpark): bfloat16 weights, five layers of two sums, eight tokens chosen one after the other.
DRAFT_BYTES, DRAFT_SUMS, DRAFT_TOKENS = 6.96e9, 10, 8


@dataclass(frozen=True)
class Program:
    """A compiled program as far as the dump tells: `bundles` by stage; `report` as `aot.CompileReport`."""

    bundles: dict[str, StageBundles]
    static_bundles: int
    vmem_bytes: int
    weight_sized_copies: int
    report: dict[str, Any]


def run(args: argparse.Namespace) -> int:
    config = args.config or "configs/k3.py"
    chip, ranks = tpu.chip(args.topology), len(topology(args.topology).devices)
    if chip != tpu.TPU7X:
        raise ConfigError(f"--topology = {args.topology}: expected a TPU7x slice, for which there are constants")
    model = load_recipe(config).model
    plan = plan_of(model, ranks, args.batch, args.context)
    report.progress(f"compiling {config} for {args.topology}, batch {args.batch}, which may take minutes")
    program = compile_step(plan, config, args.topology, args.batch, args.context)
    head = {"config": config, "topology": args.topology, "batch": args.batch, "context": args.context}
    numbers = head | facts(plan, program, chip) | predictions(plan, program.bundles, args.context)
    if args.baseline:
        numbers["baseline_mla"] = baseline(model, plan, program.bundles, args.context)
    numbers["bars"] = bars(numbers)
    if args.plot:
        decode_report.draw(numbers, args.plot)
    report.publish(args.json, numbers, decode_report.text(numbers))
    return 0


def compile_step(plan: Plan, config: str, name: str, rows: int, context: int) -> Program:
    """Raises ValueError and DumpError as `compile_program`."""
    arguments = {"config": config, "topology": name, "rows": rows, "context": context}
    with tempfile.TemporaryDirectory(prefix="k3-decode-") as folder:
        compile_program("k3_jax.bench.decode_program:lower", arguments, Path(folder), timeout=3600)
        dump = Dump(Path(folder))
        code = compiled.read_code(dump)
        return Program(
            compiled.stage_bundles(code, plan),
            code.static,
            dump.vmem_bytes(compiled.label(dump)),
            compiled.weight_sized_copies(dump, plan),
            dump.report,
        )


def facts(plan: Plan, program: Program, chip: tpu.Chip) -> dict[str, Any]:
    """Of the plan and of the program, without a model of time."""
    ledger, c = Ledger(plan), plan.config
    stored = c.ranks * sum(ledger.hbm[name] for name in plan.weights)
    phases = {name: len(plan.layer_exchanges(LayerKind(mla=name == "mla", moe=True))) for name in ("kda", "mla")}
    groups = c.moe.experts // plan.weights["experts"].shape[1]  # in how many parts the experts are dealt to ranks
    most, mean = published.busiest(c.rows, groups) if groups > 1 else (1.0, 1.0)
    prefill, peak = prefill_bytes(plan), program.report["peak_bytes"]
    least = least_bytes(ledger)
    return {
        "hbm_gib_per_core": peak / 2**30,
        "vmem_mib_per_core": program.vmem_bytes / tpu.MIB,
        "vmem_mib_planned": sum(ledger.vmem.values()) / tpu.MIB,
        "pallas_calls_per_step": program.report["custom_calls"]["tpu_custom_call"],
        "steps_per_call": STEPS,
        "collective_phases_per_layer": phases,
        "collective_phases_per_step": len(plan.step_exchanges),
        "weight_sized_copies": program.weight_sized_copies,
        "bytes_per_step": ledger.step_bytes,
        "bytes_minimum": least,
        "bytes_over_minimum": ledger.step_bytes / least,
        "static_bundles": program.static_bundles,
        "stages": stages(plan, program.bundles),
        "max_rank_over_mean": most / mean,
        "weight_copies": stored // ledger.model_bytes,
        "weight_bytes_over_model": stored / ledger.model_bytes,
        "prefill_fits": bool(peak + prefill <= chip.program_hbm_bytes),
        "prefill": {"tokens": PREFILL_TOKENS, "gib_per_core": prefill / 2**30, "compiled": False},
        "roofline_tokens_per_s": c.rows * c.ranks * chip.hbm_bandwidth / least,
    }


def least_bytes(ledger: Ledger) -> float:
    """The ledger's minimum with an expert that several rows choose read once; rows choose uniformly."""
    c = ledger.plan.config
    E, k = c.moe.experts, c.moe.top_k
    shared = c.rows * k - E * (1 - (1 - k / E) ** c.rows)
    return ledger.minimum_bytes - len(c.moe_layers) * shared * ledger.expert_bytes


def prefill_bytes(plan: Plan) -> int:
    """Activations of one rank for a chunk of one prompt, nothing of it cut by tokens: stream, mixtures' sources and
    two more like the stream in float32; this rank's heads; latents of every token and choice in and out. No program
    that prefills from the tape exists yet; this is a count of arrays, not a compilation."""
    c, P, share = plan.config, PREFILL_TOKENS, plan.config.share
    stream = 4 * c.hidden * (c.attn_res_blocks + 3)
    heads = 4 * 5 * share(c.kda.heads) * c.kda.head_dim
    routed = c.moe.top_k * (2 * c.moe.latent + 4 * c.moe.latent + 4 * 2 * share(c.moe.expert))
    return P * (stream + heads + routed)


def stages(plan: Plan, bundles: dict[str, StageBundles]) -> list[dict[str, Any]]:
    """Per stage, of one execution on one rank: bundles, bytes of the tape, of experts and of one tile of the cache."""
    c, tape = plan.config, plan.tape
    parts = [(mixer_stages(plan, x), tape.mla if x else tape.kda) for x in (False, True)]
    parts += [(channel_stages(plan, x), tape.moe if x else tape.dense) for x in (False, True)]
    choices, record = c.rows * c.moe.top_k, 4 * plan.record.shape[0] * plan.record.shape[1]
    tile, found = c.rows * c.blocks.cache_rows * c.key_width * 2, {}
    for group, part in parts:
        for stage in group:
            pieces = [p for name in (*stage.during, *stage.matrices) for b in part.of(name) for p in b.pieces]
            size = sum(p.rows for p in pieces) * c.blocks.tile_cols * 2
            found[stage.name] = size + stage.experts * choices * record + stage.attention * tile
    found["head"] = tape.head.tiles * c.blocks.tile_rows * c.blocks.tile_cols * 2
    count = lambda x: x.once + x.first + choices * x.expert + c.rows * x.tile  # noqa: E731
    return [
        {"name": name, "bundles": round(count(x)), "dma_bytes": found.get(name, 0)} for name, x in bundles.items()
    ]


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
            "ring_mib": 2 * plan.config.blocks.banks * plan.config.blocks.tile_rows * plan.config.blocks.tile_cols / 2**20,
        },
        "sensitivity": [{"phase_us": us, "tokens_per_s": rows / x.now} for us, x in times.items()],
    }
    if rows == DRAFT_TOKENS:
        found["verification"] = verification(plan, now)
    return found | (_published(rows, found["sensitivity"]) if _is_k3(plan) else {"published": None})


def step_times(plan: Plan, bundles: dict[str, StageBundles], context: int, rates: Rates) -> Times:
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
    model = {batch: predict(batch, RATES) for batch in published.TOKENS_PER_SECOND}
    return {
        "predicted_published_tokens_per_s": predict(rows, RATES),
        "published": {
            "measured_tokens_per_s": published.TOKENS_PER_SECOND,
            "speculative": published.SPECULATIVE,
            "roofline_tokens_per_s": published.ROOFLINE,
            "max_rank_over_mean": (lambda x: x[0] / x[1])(published.busiest(rows, published.GROUPS)),
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


def _draft(size: float, phases: int):
    yield Fetch("weights", size)
    yield Wait("weights")
    for i in range(phases):
        yield from (Send(i, 0), Wait(i), Compute(0.0))


def baseline(model: K3Config, plan: Plan, bundles: dict[str, StageBundles], context: int) -> dict[str, float]:
    """The model with MLA in every layer but the first (the kernel wants one of KDA), from the bundles of the stages in
    the model's own program."""
    everywhere = dataclasses.replace(model, mla_layers=tuple(range(1, model.num_layers)))
    other = plan_of(everywhere, plan.config.ranks, plan.config.rows, context)
    times = [step_times(x, bundles, context, RATES) for x in (plan, other)]
    return {
        "predicted_tokens_per_s": plan.config.rows / times[1].now,
        "slower": times[1].now / times[0].now,
        "model_bytes_ratio": Ledger(other).model_bytes / Ledger(plan).model_bytes,
        "cache_gib_per_core": Ledger(other).hbm["latent"] / 2**30,
    }


def bars(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """What the kernel is to reach; speed and bytes at batch 1 only."""
    phases = max(numbers["collective_phases_per_layer"].values())
    most = [("vmem_mib_per_core", numbers["vmem_mib_per_core"], 60), ("hbm_gib_per_core", numbers["hbm_gib_per_core"], 90)]
    most += [("phases per layer", phases, 5), ("weight_sized_copies", numbers["weight_sized_copies"], 0)]
    most += [("max_rank_over_mean", numbers["max_rank_over_mean"], 1.25)]
    least = []
    if numbers["batch"] == 1:
        most.append(("bytes_over_minimum", numbers["bytes_over_minimum"], 1.10))
        least.append(("predicted_tokens_per_s", numbers["predicted_tokens_per_s"], 400))
        wanted = {3.5: 1.8, 8.0: 1.4}
        lines = [x for x in numbers["sensitivity"] if "ratio" in x and x["phase_us"] in wanted]
        least += [(f"ratio at {x['phase_us']} us", x["ratio"], wanted[x["phase_us"]]) for x in lines]
    rows = [(*x, x[1] <= x[2], "at most") for x in most] + [(*x, x[1] >= x[2], "at least") for x in least]
    return [{"name": n, "value": v, "bar": f"{word} {bar}", "met": bool(met)} for n, v, bar, met, word in rows]
