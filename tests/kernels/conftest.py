"""The fixture that every test of a kernel takes its implementation from."""

import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.kernels.kda_cases import IMPLEMENTATIONS

# The interpreter takes seconds per case: of the Pallas kernels these run by default, the others with the slow tests.
QUICK_WITH_PALLAS = (
    "golden",
    "bounded-T33-bfloat16",
    "fla-1-T63",
    "fla-9-HV4-of-2",
    "ours-HV6",
    "ours-65-ids",
    "ours-some-of-1",
    "ours-36-some-empty",
    "ours-lowest-bound",
    "ours-57-cosine",
    "correlated-0.99-gate-0.01",
)


def pytest_collection_modifyitems(items):
    for item in items:
        call = getattr(item, "callspec", None)
        interpreted = call is not None and call.params.get("implementation") == "pallas"
        if interpreted and not any(name in item.nodeid for name in QUICK_WITH_PALLAS):
            item.add_marker("slow")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    """A value of chunk_kda's `implementation`; Pallas kernels run in TPU interpret mode, where unset memory is NaN."""
    if request.param != "pallas":
        yield request.param
        return
    with pltpu.force_tpu_interpret_mode():
        yield request.param
    pltpu.reset_tpu_interpret_mode_state()
