"""Mistakes that other kernels have made, made in ours: each must fail a case.

Not here: a DMA that nobody waits for. Our kernels start none themselves; Pallas' own pipeline moves their blocks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import blocks, chunk_kda, pallas_bwd, pallas_decode, pallas_fwd, recurrent_kda, tiles
from tests.kernels import test_kda_cases
from tests.kernels.kda_cases import CASES, DECODE
from tests.kernels.mutation import replace
from tests.kernels.test_kda_causality import changed, example

pytestmark = pytest.mark.usefixtures("interpreted")
BY_ID = {case.id: case for case in CASES}


def passes_case(name: str) -> None:
    case = BY_ID[name].cut()
    op = functools.partial(chunk_kda, implementation="pallas", gate_lower_bound=case.bound, scale=case.scale)
    test_kda_cases.check(op, case, *test_kda_cases.limits(case, "pallas"))


def sees_no_later_gate() -> None:
    arguments, other, _, _ = example(-5.0, 33, "bfloat16")
    run = jax.jit(lambda **tokens: chunk_kda(**tokens, implementation="pallas", gate_lower_bound=-5.0)[0])
    o, P = run(**arguments), 16 + 5
    np.testing.assert_array_equal(run(**changed(arguments, other, "g", P))[:, :P], o[:, :P])


def a_midpoint_anchor(monkeypatch):
    """Rows and columns of a tile decayed to its middle row: half the range, and the future in the past's rounding."""
    replace(
        monkeypatch, tiles.products_bounded,
        {
            "    yield\n    own, rows = columns.astype(dtype), [x.astype(dtype) for x in (q_rows, k_rows)]": """
    middle = [to_first[n * TILE + 8 : n * TILE + 9] - centre for n in tiles]
    of_rows = jnp.concatenate([jnp.broadcast_to(x, (TILE, x.shape[1])) for x in middle])
    own = (columns * jnp.exp2(of_rows)).astype(dtype)
    rows = [(x * jnp.exp2(-of_rows)).astype(dtype) for x in (q_rows, k_rows)]
    yield""",
            "*(x.astype(dtype) for x in earlier)": "*((x * jnp.exp2(middle[n])).astype(dtype) for x in earlier)",
        },
    )  # fmt: skip
    return sees_no_later_gate


def no_mask_on_the_diagonal_tile(monkeypatch):
    changes = {"jnp.where(col <= row, products.P, 0.0)": "jnp.where(col // 16 <= row // 16, products.P, 0.0)"}
    replace(monkeypatch, blocks.load_chunk, changes, pallas_fwd, pallas_bwd)
    return functools.partial(passes_case, "ours-lowest-bound")


def a_state_in_bfloat16(monkeypatch):
    old = "scratch.state[h] = scratch.decay[h, :1] * scratch.state[h] + dot(U[i], scratch.k_out[h], COLUMNS_BY_ROWS)"
    replace(monkeypatch, pallas_fwd._inter, {old: f"{old}.astype(jnp.bfloat16).astype(jnp.float32)"})
    return functools.partial(passes_case, "fla-1-T63")


def no_reset_at_a_segment(monkeypatch):
    replace(monkeypatch, pallas_fwd._kernel, {"steps.reset[m] == 1": "m == 0"})
    return functools.partial(passes_case, "ours-some-of-1-bounded")


def no_mask_between_segments(monkeypatch):
    replace(monkeypatch, blocks.load_chunk, {"masks is not None and masks.same is not None": "False"}, pallas_fwd)
    return functools.partial(passes_case, "ours-65-ids-bounded")


def an_inverse_by_powers(monkeypatch):
    """(I - L)(I + L^2)(I + L^4)(I + L^8): exact in exact arithmetic."""

    def by_powers(L):
        yield
        power = -jnp.stack(jnp.split(L, L.shape[1] // 16, axis=1))
        A = jnp.broadcast_to(jnp.eye(16), power.shape) + power
        for _ in range(3):
            power = jnp.einsum("nij,njk->nik", power, power, precision="highest")
            A = A + jnp.einsum("nij,njk->nik", A, power, precision="highest")
        return jnp.concatenate(list(A), axis=1)

    monkeypatch.setattr(tiles, "invert_tiles", by_powers)
    return functools.partial(passes_case, ALTERNATING)


def a_decode_step_that_keeps_the_state(monkeypatch):
    replace(monkeypatch, pallas_decode._kernel, {"flag & STARTS == 0, token": "True, token"})

    def check():
        case = next(case for case in DECODE if case.id == "decode-drafts")
        op = functools.partial(recurrent_kda, implementation="pallas")
        test_kda_cases.check(op, case, *test_kda_cases.limits(case, "xla"))

    return check


ALTERNATING = next(case.id for case in CASES if case.kind == "alternating" and case.dtype == "float32")
MISTAKES = [
    a_midpoint_anchor, no_mask_on_the_diagonal_tile, a_state_in_bfloat16, no_reset_at_a_segment,
    no_mask_between_segments, an_inverse_by_powers, a_decode_step_that_keeps_the_state,
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_fails(mistake, monkeypatch):
    check = mistake(monkeypatch)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_without_the_mistake_it_passes(mistake):
    with pytest.MonkeyPatch.context() as patch:
        check = mistake(patch)
    check()
