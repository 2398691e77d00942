"""The import direction of docs/design.md: left may import right, never back.

    cli -> plan, audit, bench -> k3_jax (the public names) -> train, serve -> nn -> parallel -> pallas_kernels.<op>.api
        -> pallas_kernels.<op>.{pallas_*, chunked, reference, ...} -> pallas_kernels.common -> jax

`config, recipe, overrides, mesh, sharding, dtypes` are leaves, `weights` knows names and config only, `train` and
`serve` never meet, recipes know the configuration only. Imports inside functions count too; exceptions are listed.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A part imports parts of a higher rank, or itself. A new part of k3_jax must be given its place here.
RANK = {"cli": 0, "plan": 1, "audit": 2, "bench": 2, "k3_jax": 3, "train": 4, "serve": 4, "nn": 5, "parallel": 6}
RANK |= {"op_bench": 6, "api": 7, "op": 8, "common": 9}
LEAVES = {"config", "recipe", "overrides", "mesh", "sharding", "dtypes"}
WEIGHTS_MAY_IMPORT = {"weights", "config", "dtypes"}
# `K3Config.from_hf` and `to_hf` are public; they import their module when they are called.
EXCEPTIONS = {
    ("k3_jax.config", "k3_jax.weights.hf_config.config_from_hf"),
    ("k3_jax.config", "k3_jax.weights.hf_config.config_to_hf"),
}
MAY_IMPORT_WEIGHTS = {"cli", "k3_jax", "train", "serve", "nn"}
KERNELS_MAY_IMPORT = {"jax", "jaxlib", "jaxtyping", "ml_dtypes", "numpy", "pallas_kernels"} | sys.stdlib_module_names


def imported_modules(source: str, module: str, is_package: bool) -> set[str]:
    """Dotted names that a module imports; `from a import b` gives a.b, which may be a name inside a."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            drop = node.level - is_package
            base = ".".join(parts[: len(parts) - drop]) if node.level else ""
            full = ".".join(part for part in (base, node.module) if part)
            names |= {f"{full}.{alias.name}" for alias in node.names}
    return names


def is_file(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def part_of(module: str) -> str:
    """The part that a module, given by its path, belongs to: "nn", "config", "api"..."""
    package, *rest = module.split(".")
    if package == "k3_jax":
        return rest[0] if rest else "k3_jax"
    if rest[:1] == ["common"]:
        return "common"
    inside = rest[1] if len(rest) > 1 else "api"  # the op's folder exports its api
    return {"api": "api", "bench": "op_bench"}.get(inside, "op")


def module_of(name: str) -> str:
    """The module that an imported dotted name comes from: pallas_kernels.kda.chunk_kda is pallas_kernels.kda."""
    *parents, last = name.split(".")
    if not parents or is_file(name) or last in RANK.keys() | LEAVES | {"weights"}:
        return name
    return module_of(".".join(parents))


def violation(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, or None."""
    if (module, name) in EXCEPTIONS:
        return None
    package, target = module.split(".")[0], name.split(".")[0]
    if package == "pallas_kernels" and target not in KERNELS_MAY_IMPORT:
        return "pallas_kernels imports jax only"
    if package == "configs":
        known = target in sys.stdlib_module_names or name == "k3_jax.config" or name.startswith("k3_jax.config.")
        return None if known else "recipes import k3_jax.config only"
    if target == "configs":
        return "recipes are found by path, never imported"
    if target not in ("k3_jax", "pallas_kernels"):
        return None
    return part_violation(module, module_of(name))


def part_violation(module: str, imported: str) -> str | None:
    """The rules between the parts of k3_jax and pallas_kernels."""
    source, target = part_of(module), part_of(imported)
    if source in LEAVES:
        return None if target in LEAVES | {"common"} else f"{source} is a leaf"
    if source == "weights":
        return None if target in WEIGHTS_MAY_IMPORT else "weights knows names and config only"
    if source not in RANK:
        return f"{source} has no place in the import direction yet: give it one in {Path(__file__).name}"
    if target in LEAVES:
        return None
    if target == "weights":
        return None if source in MAY_IMPORT_WEIGHTS else f"{source} stands right of weights"
    if target == "op" and not module.startswith(imported.rpartition(".")[0]) and source != "cli":
        return "an op is used through its api"
    return None if source == target or RANK[source] < RANK[target] else f"{source} stands right of {target}"


def modules() -> list[tuple[str, Path]]:
    found = []
    for folder in ("k3_jax", "pallas_kernels", "configs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_point_right(module, path):
    imported = imported_modules(path.read_text(), module, path.name == "__init__.py")
    wrong = {name: why for name in sorted(imported) if (why := violation(module, name))}
    assert not wrong, f"{module} imports {wrong}"


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("k3_jax.cli", "k3_jax.train.loop", True),
        ("k3_jax.cli", "pallas_kernels.common.aot", True),
        ("k3_jax.cli", "k3_jax.plan", True),
        ("k3_jax.bench.kda", "pallas_kernels.kda.bench.Case", True),
        ("k3_jax.bench.kda", "pallas_kernels.kda.chunked.chunk_kda_xla", False),
        ("k3_jax.bench.balance", "k3_jax.nn.balance", True),
        ("k3_jax.nn.kda", "k3_jax.bench.report", False),
        ("k3_jax.plan", "k3_jax.train.optimizer", True),
        ("k3_jax.train.loop", "k3_jax.overrides.to_json", True),
        ("k3_jax.train.loop", "k3_jax.plan", False),
        ("k3_jax.config", "k3_jax.weights.hf_config.config_from_hf", True),
        ("k3_jax.config", "k3_jax.weights.released", False),
        ("k3_jax", "k3_jax.nn.transformer", True),
        ("k3_jax.train.loop", "k3_jax.nn.transformer", True),
        ("k3_jax.train.loop", "k3_jax.serve.engine", False),
        ("k3_jax.serve.engine", "k3_jax.train.state", False),
        ("k3_jax.serve.engine", "k3_jax.weights.tokenizer", True),
        ("k3_jax.nn.kda", "k3_jax.train.loss", False),
        ("k3_jax.nn.kda", "k3_jax.K3", False),
        ("k3_jax.nn.kda", "pallas_kernels.kda.chunk_kda", True),
        ("k3_jax.nn.kda", "pallas_kernels.common.aot.lower_for", True),
        ("k3_jax.nn.moe", "k3_jax.parallel.expert", True),
        ("k3_jax.parallel.expert", "k3_jax.nn.moe", False),
        ("k3_jax.parallel.context", "k3_jax.sharding.spec", True),
        ("k3_jax.config", "k3_jax.nn.kda", False),
        ("k3_jax.mesh", "k3_jax.config.MeshConfig", True),
        ("k3_jax.weights.convert", "k3_jax.config.K3Config", True),
        ("k3_jax.weights.convert", "k3_jax.nn.transformer", False),
        ("pallas_kernels.kda.api", "k3_jax.config", False),
        ("pallas_kernels.kda.api", "flax.nnx", False),
        ("pallas_kernels.kda.api", "pallas_kernels.kda.reference", True),
        ("pallas_kernels.kda.api", "pallas_kernels.kda.bench", False),
        ("pallas_kernels.kda.bench", "pallas_kernels.kda.chunk_kda", True),
        ("pallas_kernels.kda.api", "pallas_kernels.common.tpu", True),
        ("pallas_kernels.common.aot", "pallas_kernels.kda.api", False),
        ("configs.tiny", "k3_jax.config.RunConfig", True),
        ("configs.tiny", "k3_jax.nn.kda", False),
        ("configs.tiny", "jax.numpy", False),
        ("k3_jax.cli", "configs.tiny", False),
        ("k3_jax.shiny", "k3_jax.nn.kda", False),
    ],
)
def test_the_rules_themselves(module, imported, allowed):
    assert (violation(module, imported) is None) == allowed, violation(module, imported)


def test_relative_and_nested_imports_are_seen():
    source = "def f():\n    from . import loop\n    from ..serve import engine\n    import jax.numpy\n"
    assert imported_modules(source, "k3_jax.train.state", is_package=False) == {
        "k3_jax.train.loop",
        "k3_jax.serve.engine",
        "jax.numpy",
    }
    assert imported_modules("from .api import f", "pallas_kernels.kda", is_package=True) == {"pallas_kernels.kda.api.f"}
