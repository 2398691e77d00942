"""Whole steps of the kernel in TPU interpret mode on fake devices, beside the reference step, in a process of its own.

A bug of a protocol can make the interpreter wait for ever, and what it says about semaphores goes to stderr: so a case
runs in a child with a time limit.

    outcome = run(Case(rows=2, steps=4))
    outcome.errors["logits"], outcome.tokens, outcome.races
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True)
class Mutation:
    """Text of a module of pallas_kernels.decode, and the mistake to make of it."""

    module: str
    old: str
    new: str


@dataclass(frozen=True)
class Case:
    """`start`: where the rows' first tokens stand, -1 for a row that is idle; caches before them are random. `per_call`
    steps are one call of the device. `router` scales the routers' weights: with 0 all experts are equal."""

    layers: int = 13
    rows: int = 2
    steps: int = 1
    start: tuple[int, ...] = (0, 17)
    tokens: tuple[int, ...] = (3, 77)
    ranks: int = 4
    cache_ranks: int = 1
    per_call: int = 1
    router: float = 1.0
    whole_sum_bytes: int = 10**6
    dtype: str = "float32"
    mode: str = "eager"
    races: bool = True
    mutations: tuple[Mutation, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """`tokens`, `expected` [steps][live rows]; `margins` between the two best tokens expected; absolute `errors`."""

    tokens: list[list[int]]
    expected: list[list[int]]
    margins: list[list[float]]
    errors: dict[str, float]
    untouched: bool
    alike: bool
    races: bool
    stderr: str

    @property
    def clean(self) -> bool:
        """No race, no semaphore left, all ranks of one opinion."""
        return self.alike and not self.races and "non-zero" not in self.stderr


def run(case: Case, timeout: int = 300) -> Outcome:
    """Raises subprocess.TimeoutExpired for a case that hangs, RuntimeError for one that fails."""
    done = child("tests.decode.case", [json.dumps(dataclasses.asdict(case))], case.ranks, timeout)
    return Outcome(**json.loads(done.stdout.splitlines()[-1]), stderr=done.stderr)


def child(module: str, arguments: list[str], ranks: int, timeout: int) -> subprocess.CompletedProcess:
    """A module as a program with so many fake devices. Raises as `run`."""
    flags = f"--xla_force_host_platform_device_count={ranks} --xla_backend_optimization_level=0"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": ROOT}
    environment["JAX_NUMPY_RANK_PROMOTION"] = "raise"
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done


def mutate(mutation: Mutation) -> None:
    """Import a module from changed text; whoever imports it later gets the mistake."""
    name = f"pallas_kernels.decode.{mutation.module}"
    spec = importlib.util.find_spec(name)
    with open(spec.origin) as file:
        source = file.read()
    assert source.count(mutation.old) == 1, f"{mutation.module} has no longer, or more than once: {mutation.old}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source.replace(mutation.old, mutation.new), spec.origin, "exec"), module.__dict__)


def import_kernel(mutations: tuple[Mutation, ...]) -> None:
    """The package, with these mistakes in it."""
    if mutations:
        # The package imports its kernel, hence an empty package first.
        spec = importlib.util.find_spec("pallas_kernels.decode")
        sys.modules["pallas_kernels.decode"] = importlib.util.module_from_spec(spec)
        for mutation in mutations:
            mutate(mutation)
        spec.loader.exec_module(sys.modules["pallas_kernels.decode"])


def main(case: Case) -> dict:
    import_kernel(case.mutations)
    from tests.decode.steps import compare

    return compare(case)


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    fields["mutations"] = tuple(Mutation(**m) for m in fields["mutations"])
    print(json.dumps(main(Case(**fields))))
