"""What every test stands on: 8 fake CPU devices, a strict JAX, the TPU compiler where it is installed, golden files.

Environment variables must stand before JAX is imported. No k3_jax or pallas_kernels module is imported here outside a
fixture: a failing import should fail the tests that need it, not the collection of all.
"""

import ast
import importlib.util
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
# Compiling is most of the suite's time; the second run on a machine skips it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("MPLBACKEND", "agg")

import jax  # noqa: E402
import jaxtyping._import_hook  # noqa: E402
import pytest  # noqa: E402
from jax._src import compiler  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
compile_or_get_cached = compiler.compile_or_get_cached


def compile_or_get_cached_on_one_device(backend, module, devices, options, callbacks, executable_devices, *profile):
    """A CPU program of several devices is compiled each time. Read from the cache it has lost the order of its
    collectives: devices that take them in different orders wait for each other, until XLA ends the process
    (jaxlib 0.12.0.1)."""
    if devices.size > 1 and backend.platform == "cpu":
        return compiler.backend_compile_and_load(backend, module, executable_devices, options, callbacks)
    return compile_or_get_cached(backend, module, devices, options, callbacks, executable_devices, *profile)


compiler.compile_or_get_cached = compile_or_get_cached_on_one_device
# Check the signatures of functions, not the fields of dataclasses: a pytree's fields also hold what jax.tree.map and
# jax.eval_shape put there, and a wrong configuration must raise our own error.
jaxtyping._import_hook.JaxtypingTransformer.visit_ClassDef = ast.NodeVisitor.generic_visit

REQUIRE_AOT = os.environ.get("K3_REQUIRE_AOT") == "1"
REQUIRE_SHARED = os.environ.get("K3_REQUIRE_SHARED") == "1"
NO_LIBTPU = "needs libtpu, the TPU compiler, which is not installed here (pip install 'k3-jax[tpu]', Linux x86-64)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--aot",
        choices=("lower", "compile", "refresh"),
        default="lower",
        help="what a check of tests/aot/facts does: lower and compare the key; compile too and compare the numbers; "
        "compile and write the file",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/aot, and all that compiles for TPU, needs libtpu."""
    for item in items:
        if item.path.is_relative_to(ROOT / "tests" / "aot") or item.get_closest_marker("aot_compile"):
            item.add_marker("aot")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("aot") and importlib.util.find_spec("libtpu") is None:
        _skip_or_fail(NO_LIBTPU, REQUIRE_AOT, "K3_REQUIRE_AOT")


MAPS, MOST_MAPS = Path("/proc/self/maps"), 40_000


def pytest_runtest_teardown() -> None:
    """Every compiled program maps memory; at Linux's default limit of 65,530 maps per process XLA crashes."""
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


def _skip_or_fail(reason: str, required: bool, variable: str) -> None:
    if required:
        pytest.fail(f"{reason}; {variable}=1 forbids to skip", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def golden() -> Path:
    """tests/golden: arrays computed by other people's code, in the repository (its README says how)."""
    return ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of released files and larger golden files beside the checkout ($K3_SHARED, else ../shared)."""
    folder = Path(os.environ.get("K3_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        _skip_or_fail(f"needs {folder.name}/ beside the checkout (or K3_SHARED)", REQUIRE_SHARED, "K3_REQUIRE_SHARED")
    return folder


@pytest.fixture(scope="session")
def make_mesh():
    """`make_mesh(fsdp=2, tensor=4)`: an Explicit mesh over the first fake devices."""

    def make(**axes: int) -> Mesh:
        count = 1
        for size in axes.values():
            count *= size
        kinds = (AxisType.Explicit,) * len(axes)
        return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=jax.devices()[:count])

    return make


@pytest.fixture
def strict_promotion():
    """No implicit change of dtype: for tests of the model and of kernels (optax needs the standard rules)."""
    with jax.numpy_dtype_promotion("strict"):
        yield
