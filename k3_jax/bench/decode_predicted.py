"""What `k3 bench decode --topology` finds: numbers of the plan, of the compiled program, and of the model of time."""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from k3_jax.bench import decode_report, report
from k3_jax.bench.decode_program import STEPS, plan_of
from k3_jax.config import ConfigError, K3Config
from k3_jax.recipe import load_recipe
from pallas_kernels.common import tpu
from pallas_kernels.common.aot import topology
from pallas_kernels.common.dump import Dump, compile_program
from pallas_kernels.decode import Plan
from pallas_kernels.decode.bench import Program, facts, model_against, predictions, read_program


def run(args: argparse.Namespace) -> int:
    config = args.config or "configs/k3.py"
    ranks, chip = len(topology(args.topology).devices), tpu.chip(args.topology)
    if chip != tpu.TPU7X:
        raise ConfigError(f"--topology = {args.topology}: expected a TPU7x slice, for which there are constants")
    model = load_recipe(config).model
    plan = plan_of(model, ranks, args.batch, args.context)
    report.progress(f"compiling {config} for {args.topology}, batch {args.batch}, which may take minutes")
    program = compile_step(plan, config, args.topology, args.batch, args.context)
    head = {"config": config, "topology": args.topology, "batch": args.batch, "context": args.context}
    head |= {"steps_per_call": STEPS, "predicted": True}
    numbers = head | facts(plan, program, chip) | predictions(plan, program.bundles, args.context)
    if args.baseline:
        numbers["baseline_mla"] = baseline(model, plan, program, args.context)
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
        return read_program(Dump(Path(folder)), plan)


def baseline(model: K3Config, plan: Plan, program: Program, context: int) -> dict[str, float]:
    """The model with MLA in every layer but the first (the kernel wants one of KDA), from the bundles of the stages in
    the model's own program."""
    everywhere = dataclasses.replace(model, mla_layers=tuple(range(1, model.num_layers)))
    other = plan_of(everywhere, plan.config.ranks, plan.config.rows, context)
    return model_against(plan, other, program.bundles, context)


def bars(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """What the kernel is to reach; speed and bytes at batch 1 only."""
    phases = max(numbers["collective_phases_per_layer"].values())
    most = [
        ("vmem_mib_per_core", numbers["vmem_mib_per_core"], 60),
        ("hbm_gib_per_core", numbers["hbm_gib_per_core"], 90),
    ]
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
