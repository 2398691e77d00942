"""The kernel's parts alone against the reference's, in float32, on_wait with race detection: see parts.py."""

import json

import pytest

from tests.decode.case import child
from tests.decode.parts import CUT, NAMES

pytestmark = pytest.mark.slow
EXACT = {"ring": 1e-2, "exchanges": 1e-4}  # sums of thousands of numbers


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    done = child("tests.decode.parts", [], ranks=4, timeout=400)
    assert "non-zero" not in done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}-cut" for name in CUT)])
def test_part(errors, name):
    assert errors[name] < EXACT.get(name.partition("-")[0], 2e-5)
