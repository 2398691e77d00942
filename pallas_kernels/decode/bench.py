"""What `k3 bench decode` tells of a plan and of its compiled program; predictions of time are in `predicted`."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels.common import tpu
from pallas_kernels.common.dump import Dump
from pallas_kernels.decode import compiled, published
from pallas_kernels.decode.config import LayerKind
from pallas_kernels.decode.ledger import Ledger
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.predicted import predictions, step_times
from pallas_kernels.decode.stages import StageBundles, channel_stages, mixer_stages

__all__ = ["Program", "facts", "model_against", "predictions", "read_program"]

PREFILL_TOKENS = 8192


@dataclass(frozen=True)
class Program:
    """A compiled program as far as the dump tells: `bundles` by stage; `report` as `aot.CompileReport`."""

    bundles: dict[str, StageBundles]
    static_bundles: int
    vmem_bytes: int
    weight_sized_copies: int
    report: dict[str, Any]


def read_program(dump: Dump, plan: Plan) -> Program:
    """Raises DumpError if the program is not built as the plan says."""
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
    count = lambda x: x.during + x.once + x.first + choices * x.expert + c.rows * x.tile  # noqa: E731
    return [{"name": name, "bundles": round(count(x)), "dma_bytes": found.get(name, 0)} for name, x in bundles.items()]


def model_against(plan: Plan, other: Plan, bundles: dict[str, StageBundles], context: int) -> dict[str, float]:
    """Another model of the same widths, whose stages are among those of `plan`: its speed, and how much slower."""
    ours, theirs = (step_times(x, bundles, context).now for x in (plan, other))
    return {
        "predicted_tokens_per_s": other.config.rows / theirs,
        "slower": theirs / ours,
        "model_bytes_ratio": Ledger(other).model_bytes / Ledger(plan).model_bytes,
        "cache_gib_per_core": Ledger(other).hbm["latent"] / 2**30,
    }
