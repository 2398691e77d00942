"""Compiling a program with libtpu's dump flags set, and the files that libtpu then writes.

libtpu reads its flags once, when it is loaded, so a process of its own compiles. `packed-bundles-post-ra` is the
schedule with its waits written out, one bundle per cycle; `final_bundles` is what is executed, with most waits folded
into the bundles before them.
"""

import dataclasses
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels.common import tpu

PACKED, FINAL = "packed-bundles-post-ra", "final_bundles"
SLOTS, EQUAL_OPS = "pre-delay_hlo-static-per-bundle-utilization", "deduplication-map"
TOP = "TLP"  # the label of the program that calls the ops
_FLAGS = (
    "--xla_jf_dump_to={}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_static_gaps=true",
    f"--xla_jf_dump_llo_pass_label_regex=^({PACKED}|{FINAL}|{SLOTS}|{EQUAL_OPS})$",  # of all, 2 % of the bytes
)
_REFUSED = 2  # exit status of the compiling process if the function itself raised


class DumpError(RuntimeError):
    """The program did not compile, or its dump is not of the form that we know."""


def compile_program(target: str, arguments: dict[str, Any], folder: Path, timeout: int) -> None:
    """Compile what a function lowers and dump it into an empty folder.

    `target` is "module:function" or "file.py:function"; called with `arguments`, it returns a `jax.stages.Lowered`.
    Raises ValueError if it raises, DumpError if compiling does or takes more than `timeout` seconds.
    """
    environment = os.environ | {
        "LIBTPU_INIT_ARGS": " ".join(_FLAGS).format(folder),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # what comes from a cache is not dumped
    }
    code = "import sys; from pallas_kernels.common import dump; sys.exit(dump.write_program(*sys.argv[1:]))"
    command = [sys.executable, "-c", code, target, json.dumps(arguments), str(folder)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise DumpError(f"compiling takes more than {timeout} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise (ValueError if done.returncode == _REFUSED else DumpError)(lines[-1])


def write_program(target: str, arguments: str, folder: str) -> int:
    """The compiling process: writes HLO, report and kind of device too. The last line of stderr is the error."""
    import jax

    from pallas_kernels.common.aot import report_of

    try:
        lowered = _load(target)(**json.loads(arguments))
    except Exception as error:
        return _refuse(error, _REFUSED)
    try:
        compiled = lowered.compile()
    except Exception as error:
        return _refuse(error, 1)
    device = next(iter(jax.tree.leaves(compiled.output_shardings)[0].device_set))
    Path(folder, "device_kind").write_text(device.device_kind)
    Path(folder, "program.hlo").write_text(compiled.as_text())
    Path(folder, "report.json").write_text(json.dumps(dataclasses.asdict(report_of(compiled))))
    return 0


def _load(target: str) -> Callable[..., Any]:
    place, _, name = target.rpartition(":")
    names = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
    if name not in names:
        raise ValueError(f"target = {target!r}: expected a function of {place}")
    return names[name]


def _refuse(error: Exception, status: int) -> int:
    print(" ".join(str(error).split())[:1000] or repr(error), file=sys.stderr)
    return status


@dataclass(frozen=True)
class Dump:
    """The files of one compiled program. Labels are names of HLO ops, or TOP."""

    folder: Path

    @property
    def chip(self) -> tpu.Chip:
        return tpu.chip((self.folder / "device_kind").read_text())

    @property
    def hlo(self) -> str:
        return (self.folder / "program.hlo").read_text()

    @property
    def report(self) -> dict[str, Any]:
        """The fields of `aot.CompileReport`."""
        return json.loads((self.folder / "report.json").read_text())

    def vmem_bytes(self, label: str) -> int:
        """VMEM that an op's buffers and spilled registers take, of the compiler's report."""
        (report,) = self.folder.glob(f"*-{TOP}-*-vmem_report.html")
        found = re.search(rf'"{re.escape(label)}": \{{.*?"total_size": (\d+)', report.read_text(), re.DOTALL)
        if not found:
            raise DumpError(f"VMEM of {label}: expected it in {report.name}")
        return int(found[1])

    def text(self, label: str, kind: str) -> str:
        """One file: they are named TIME-LABEL-NUMBER-KIND.txt. Raises DumpError unless there is exactly one."""
        pattern = re.compile(rf"\d+-{re.escape(label)}-\d+-{re.escape(kind)}\.txt")
        found = [path for path in self.folder.iterdir() if pattern.fullmatch(path.name)]
        if len(found) != 1:
            raise DumpError(f"{kind} of {label}: expected one file in the dump, found {len(found)}")
        return found[0].read_text()

    def label_of_op(self) -> dict[str, str]:
        """The label under which an op is dumped: equal ops are compiled once."""
        group = r"^key:(.*)\nordinal.*\nequivalent.*\n((?:  .*\n?)*)"
        groups = re.findall(group, self.text(TOP, EQUAL_OPS), re.MULTILINE)
        return {name: label for label, names in groups for name in names.split()}

    def slots(self, label: str) -> tuple[dict[str, int], np.ndarray]:
        """Slots per bundle by name, and those in use, [bundles, slots], in the order of PACKED."""
        lines = self.text(label, SLOTS).splitlines()
        names = [name.strip().rpartition(":")[2] for name in lines[1].split(",")]
        capacity = dict(zip(names, map(int, lines[2].split()), strict=True))
        return capacity, np.array([line.split() for line in lines[4:] if line.strip()], int).reshape(-1, len(names))
