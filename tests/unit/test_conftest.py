"""What tests/conftest.py and setup.cfg promise to every test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from pallas_kernels.common import aot, tpu

ROOT = Path(__file__).resolve().parents[2]


def test_eight_devices(make_mesh):
    assert jax.device_count() >= 8
    assert dict(make_mesh(fsdp=2, tensor=4).shape) == {"fsdp": 2, "tensor": 4}


def test_signatures_are_checked():
    with pytest.raises(TypeCheckError, match="chip"):
        tpu.chip(3)


def test_fields_of_pytrees_are_not():
    report = aot.CompileReport(*range(6), {}, {}, copies="not an integer")
    assert report.copies == "not an integer"


def test_ranks_are_not_promoted():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones(3) + jnp.ones((2, 3))


def test_dtypes_are_not_promoted_under_the_fixture(strict_promotion):
    with pytest.raises(jax.dtypes.TypePromotionError):
        jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.bfloat16)


@pytest.fixture
def run_one_test(tmp_path):
    """Runs pytest on one test file that stands beside a copy of conftest.py and setup.cfg."""

    def run(test: str, **environment: str) -> str:
        (tmp_path / "tests").mkdir()
        shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
        shutil.copy(ROOT / "setup.cfg", tmp_path)
        (tmp_path / "tests" / "test_one.py").write_text(test + "\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        env = os.environ | environment
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout

    return run


NEEDS_BOTH = """
import sys
import pytest
sys.modules["libtpu"] = None  # as if it were not installed
def test_released_files(shared): pass
@pytest.mark.aot
def test_compilation(): pass
"""


@pytest.mark.parametrize(("required", "outcome"), [("0", "2 skipped"), ("1", "2 errors")])
def test_absent_files_and_compiler_skip_or_fail_with_the_reason(run_one_test, required, outcome):
    out = run_one_test(NEEDS_BOTH, K3_SHARED="/nowhere/shared", K3_REQUIRE_SHARED=required, K3_REQUIRE_AOT=required)
    assert outcome in out
    assert "needs shared/ beside the checkout" in out and "needs libtpu" in out
