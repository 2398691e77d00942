"""Facts about compiled TPU programs, committed beside the tests and checked in two ways.

`make test` lowers each program (seconds) and compares the key of its facts: a program that changed has stale facts, and
the test fails with the command that refreshes them. `make test-aot` compiles it (minutes) and compares the numbers.

    def test_train_step(facts):
        mesh = aot.mesh_for("v6e:2x4", fsdp=8)
        report = facts.check("train_step_v6e", aot.lower_for(step, *arguments, mesh=mesh), "v6e:2x4")
        assert report.peak_bytes < tpu.V6E.hbm_bytes      # of the committed facts, or of this compilation
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

BYTES_TOLERANCE = 0.02


@dataclass(frozen=True)
class Facts:
    """The facts in `folder`, one JSON file per name; `mode` is lower, compile or refresh (pytest's --aot).

    `refresh` is the command that writes those of the running test.
    """

    folder: Path
    mode: str
    refresh: str

    def check(self, name: str, lowered: jax.stages.Lowered, topology: str) -> Any:
        """Compare a lowered program with its committed facts; returns the report (committed, or of this compilation).

        Fails if the facts are missing or stale, if a byte count moves by more than 2 %, or
        if a collective, custom call or copy is added or lost.
        """
        from pallas_kernels.common import aot  # the type-checking import hook is installed after conftest files

        head = {"key": aot.fact_key(lowered, topology), "topology": topology, "libtpu": aot.libtpu_version()}
        if self.mode == "refresh":
            report = aot.compile_lowered(lowered)
            self._write(name, head | {"report": dataclasses.asdict(report)})
            return report
        committed = self._read(name, head)
        expected = aot.CompileReport(**committed["report"])
        if self.mode == "lower":
            return expected
        report = aot.compile_lowered(lowered)
        _compare(name, dataclasses.asdict(report), committed["report"])
        return report

    def _read(self, name: str, head: dict[str, str]) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        if not path.exists():
            pytest.fail(f"no facts for {name} yet: run {self.refresh}", pytrace=False)
        committed = json.loads(path.read_text())
        for field, what in (("topology", "topology"), ("libtpu", "libtpu"), ("key", "program")):
            if committed[field] != head[field]:
                change = f"{committed[field][:12]} -> {head[field][:12]}"
                pytest.fail(
                    f"the facts of {name} are stale ({what}: {change}): run {self.refresh} and look at the difference",
                    pytrace=False,
                )
        return committed

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _compare(name: str, report: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = []
    for field, want in expected.items():
        have = report[field]
        tolerance = BYTES_TOLERANCE * want if field.endswith("_bytes") else 0
        if (abs(have - want) > tolerance) if isinstance(want, int) else (have != want):
            wrong.append(f"{field}: {want} -> {have}")
    if wrong:
        pytest.fail(f"{name} compiles otherwise than its facts say: {'; '.join(wrong)}", pytrace=False)


@pytest.fixture
def facts(request: pytest.FixtureRequest) -> Facts:
    """The committed facts, `tests/aot/facts`."""
    refresh = f"make aot-facts ARGS='{request.node.nodeid}'"
    return Facts(Path(__file__).parent / "facts", request.config.getoption("--aot"), refresh)
