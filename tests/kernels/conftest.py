"""How tests of kernels run what is written for a TPU."""

import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.kda_cases import IMPLEMENTATIONS

# The interpreter takes seconds per case: of the Pallas kernels these run by default, the others with the slow tests.
QUICK_WITH_PALLAS = (
    "golden",
    "bounded-T33-bfloat16",
    "fla-9-HV4-of-2",
    "ours-65-ids",
    "ours-some-of-1",
    "ours-36-some-empty",
    "ours-57-cosine",
    "correlated-0.99-gate-0.01",
    "an-id-returns",
    "whole-blocks-of-documents",
    "odd-heads",
)


def pytest_collection_modifyitems(items):
    for item in items:
        call = getattr(item, "callspec", None)
        interpreted = call is not None and call.params.get("implementation") == "pallas"
        if interpreted and not any(name in item.nodeid for name in QUICK_WITH_PALLAS):
            item.add_marker("slow")


@pytest.fixture
def interpreted():
    """Pallas kernels run in TPU interpret mode, where unset memory is NaN."""
    with pltpu.force_tpu_interpret_mode():
        yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """A value of chunk_kda's `implementation`."""
    if request.param == "pallas":
        request.getfixturevalue("interpreted")
    return request.param
