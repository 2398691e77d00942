"""Ahead-of-time compilation for TPU on a machine without one, and what the compiled program says about itself.

libtpu compiles real TPU executables on any x86-64 Linux machine. A program that cannot be placed in VMEM or HBM, that
Mosaic cannot lower, or that needs another layout fails here as it would on the chip. What a report cannot show is time.

    mesh = mesh_for("v6e:2x4", fsdp=2, tensor=4)
    lowered = lower_for(jax.jit(step), abstract((2048, 1024), jnp.bfloat16, mesh, "fsdp"), mesh=mesh)
    report = report_of(lowered.compile())
"""

import collections
import contextlib
import functools
import hashlib
import importlib.metadata
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# libtpu asks a metadata server for the machine that it would run on, and takes a lock that only one process can hold;
# neither is wanted where it only compiles. Where JAX may use a TPU the caller's environment stands.
COMPILER_ONLY = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)


class LibtpuMissing(RuntimeError):
    """Compiling for TPU needs libtpu, which exists for Linux on x86-64 only."""


@functools.cache
def libtpu_version() -> str:
    """The version of the installed TPU compiler. Raises LibtpuMissing."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise LibtpuMissing("libtpu is not installed: pip install 'k3-jax[tpu]' (Linux x86-64)") from None


@functools.cache
def topology(name: str) -> topologies.TopologyDescription:
    """Devices of a TPU topology such as "v5p:2x2x1", "v6e:2x4" or "tpu7x:4x4x4"; the first call takes seconds.

    Raises LibtpuMissing, or ValueError for a name that libtpu does not know.
    """
    libtpu_version()
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        for key, value in COMPILER_ONLY.items():
            os.environ.setdefault(key, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"topology = {name!r}: expected a name such as v6e:2x4 ({error})") from error


def mesh_for(topology_name: str, **axes: int) -> Mesh:
    """An Explicit mesh over the first devices of a topology: `mesh_for("v6e:2x4", fsdp=2, tensor=4)`.

    Raises ValueError if the topology has fewer devices than the axes need.
    """
    devices = topology(topology_name).devices
    count = math.prod(axes.values())
    if count > len(devices):
        raise ValueError(f"axes = {axes}: expected at most {len(devices)} devices, as {topology_name} has")
    shape, names, kinds = tuple(axes.values()), tuple(axes), (AxisType.Explicit,) * len(axes)
    if count == len(devices):
        return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)
    return Mesh(np.array(devices[:count]).reshape(shape), names, axis_types=kinds)


def abstract(shape: tuple[int, ...], dtype: Any, mesh: Mesh, *spec: Any) -> jax.ShapeDtypeStruct:
    """An argument without data, sharded over the mesh by `PartitionSpec(*spec)`."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def lower_for(function: Callable, *arguments: Any, mesh: Mesh) -> jax.stages.Lowered:
    """Lower a function (a `jax.jit` result, or a plain one) for the devices of the mesh.

    The mesh is set while tracing: kernels read the chip's facts from it.
    """
    jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
    with jax.set_mesh(mesh):
        return jitted.lower(*arguments)


def compile_for(function: Callable, *arguments: Any, mesh: Mesh) -> "CompileReport":
    """Compile a function for the devices of the mesh and report.

    Raises jax.errors.JaxRuntimeError if VMEM or HBM is too small, NotImplementedError for an operation not lowered.
    """
    return compile_lowered(lower_for(function, *arguments, mesh=mesh))


def compile_lowered(lowered: jax.stages.Lowered) -> "CompileReport":
    """Compile what `lower_for` returned, without the disk cache, and report."""
    with no_disk_cache():
        return report_of(lowered.compile())


@contextlib.contextmanager
def no_disk_cache() -> Iterator[None]:
    """JAX writes an executable for an absent TPU to its cache but cannot load it: each later compilation would warn."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


@dataclass(frozen=True)
class CompileReport:
    """What one compiled program needs, in bytes per device, and what its HLO holds.

    `peak_bytes` is the compiler's estimate of HBM in use at once, arguments included. Collectives count instructions by
    kind (a loop's body counts once), custom calls by target ("tpu_custom_call" is Pallas), copies are those between
    layouts, without prefetches to VMEM.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    code_bytes: int
    collectives: dict[str, int]
    custom_calls: dict[str, int]
    copies: int


def report_of(compiled: jax.stages.Compiled) -> CompileReport:
    """The report of a compiled TPU program."""
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    return CompileReport(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.peak_memory_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        collectives=hlo_collectives(hlo),
        custom_calls=custom_call_targets(hlo),
        copies=hlo_opcodes(hlo)["copy"],
    )


def hlo_opcodes(hlo: str) -> collections.Counter[str]:
    """How often each opcode stands in HLO text."""
    return collections.Counter(re.findall(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\(", hlo, re.MULTILINE))


def hlo_collectives(hlo: str) -> dict[str, int]:
    """How often each kind of collective stands in HLO text; an asynchronous pair `x-start`, `x-done` is one `x`.

    Where the TPU compiler writes a reduce-scatter as a fusion of that name around an all-reduce, it counts as such.
    """
    opcodes = hlo_opcodes(hlo)
    counts = {kind: opcodes[kind] + opcodes[f"{kind}-start"] for kind in COLLECTIVES}
    fused = len(re.findall(r"^%all-reduce-scatter[\w.\-]* \(", hlo, re.MULTILINE))
    counts["all-reduce"] -= fused
    counts["reduce-scatter"] += fused
    return {kind: count for kind, count in counts.items() if count}


def custom_call_targets(hlo: str) -> dict[str, int]:
    """How often each custom call target stands in HLO text."""
    return dict(sorted(collections.Counter(re.findall(r'custom_call_target="([^"]+)"', hlo)).items()))


def lowered_text(lowered: jax.stages.Lowered) -> str:
    """StableHLO without source positions: the same for the same program wherever its files stand.

    JAX leaves positions out of the module's text; a Pallas kernel's are a field of its custom call's configuration.
    """
    return re.sub(r", \\22debug_locations\\22: \\22[^\\]*\\22", "", lowered.as_text())


def fact_key(lowered: jax.stages.Lowered, topology_name: str) -> str:
    """Identifies a compilation: sha256 of the program, the topology and the compiler's version."""
    parts = (lowered_text(lowered), topology_name, libtpu_version())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
