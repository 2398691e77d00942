"""The training step compiled by libtpu for a whole pod: what it needs, what it sends, how much of that it hides."""

import re
import resource
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from k3_jax.config import ConfigError, RunConfig
from k3_jax.plan.bracket import Bracket
from k3_jax.plan.flows import bandwidth
from k3_jax.plan.pod import Pod
from k3_jax.plan.step import lower_train_step
from pallas_kernels.common import aot, traffic
from pallas_kernels.common.hlo import Computation, Op
from pallas_kernels.common.overlap import Replay, Transfer, replay
from pallas_kernels.common.traffic import Collective


@dataclass(frozen=True)
class CompiledStep:
    """Bytes per device, what compiling took, the collectives with their loops, and the schedule replayed once."""

    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    lower_seconds: float
    compile_seconds: float
    host_bytes: int  # of memory that compiling took
    collectives: list[Collective]
    schedule: Replay

    def seconds(self) -> dict[str, float]:
        """Of a step, by how much of transfers and work overlaps."""
        found = self.schedule
        bracket = Bracket(found.compute, found.transfer).seconds()
        return {"no overlap": bracket["no overlap"], "as scheduled": found.now, "full overlap": bracket["full overlap"]}

    def sent(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes that a device sends in a step, by kind and axes."""
        found = Counter()
        for x in self.collectives:
            found[x.kind, x.axes] += x.bytes * x.times
        return dict(found)


def lower(run: RunConfig, pod: Pod) -> tuple[jax.stages.Lowered, float]:
    """The step and the seconds that it took. Raises ConfigError for what does not divide, or no TPU compiler."""
    begin = time.monotonic()
    try:
        devices = list(aot.topology(pod.topology).devices)
    except (ValueError, aot.LibtpuMissing) as error:
        raise ConfigError(f"--topology = {pod.topology}: {error}") from error
    return lower_train_step(run, devices, "tpu"), time.monotonic() - begin


def compile_step(run: RunConfig, pod: Pod, effort: str) -> CompiledStep:
    """`effort` is XLA's optimization level, O0 to O3. Raises ConfigError if the step does not fit."""
    lowered, lower_seconds = lower(run, pod)
    begin = time.monotonic()
    try:
        with aot.no_disk_cache():
            compiled = lowered.compile(compiler_options={"optimization_level": effort})
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(f"{run.name} does not fit {pod.topology}: {str(error).splitlines()[0]}") from error
    seconds, memory, text = time.monotonic() - begin, compiled.memory_analysis(), compiled.as_text()
    mesh = dict(pod.mesh(run.mesh).shape)
    return CompiledStep(
        memory.argument_size_in_bytes,
        # temp_size_in_bytes counts buffers of loops again: 102 GB where the compiler places 61.
        memory.total_allocation_bytes - memory.argument_size_in_bytes,
        memory.generated_code_size_in_bytes,
        lower_seconds,
        seconds,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        traffic.collectives(text, mesh),
        replay(text, pod.chip, cost_of(pod, mesh)),
    )


def cost_of(pod: Pod, mesh: Mapping[str, int]):
    """The transfers of collectives for `replay`, at the uncalibrated bandwidths of `flows`, by kind and axes."""

    def cost(op: Op, inside: Computation, computations: dict[str, Computation]) -> Transfer | None:
        found = _inner(op, inside, computations)
        if found is None:
            return None
        kind, axes, size = traffic.kind_of(found[0]), traffic.axes_of(found[0], mesh), traffic.sent(*found, mesh)
        return Transfer(float(size), size / bandwidth(kind, axes, pod.chip, mesh), (kind, axes))

    return cost


def _inner(op: Op, inside: Computation, computations: dict[str, Computation]) -> tuple[Op, Computation] | None:
    """The collective that an op is, or that the computation holds which it or its call-start calls."""
    if traffic.kind_of(op):
        return op, inside
    source = inside[op.operands[0]] if op.opcode == "call-update" else op
    called = re.search(r"(?:to_apply|calls)=%([\w.\-]+)", source.rest)
    body = computations.get(called[1], {}) if called else {}
    return next(((x, body) for x in body.values() if traffic.kind_of(x)), None)
