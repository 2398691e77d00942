"""Generation with the decode kernel. What surrounds the kernel is tested with a stand-in for its step; the whole in the
TPU interpreter, against the released model's own tokens and the XLA engine (slow)."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import ConfigError
from k3_jax.nn.pretrained import load_config
from k3_jax.serve import megakernel
from k3_jax.serve.decode import ENDED, generate
from k3_jax.serve.megakernel import Engine, rank_mesh, steps_program
from k3_jax.serve.packed import Cut
from k3_jax.serve.packing import pack_checkpoint
from k3_jax.serve.sampling import SamplingConfig
from k3_jax.serve.sources import open_checkpoint
from pallas_kernels.decode import AXIS
from tests.decode.case import child

RANKS, V = 2, 128
NAN_AFTER = 77


def stand_in(plan, token, position, slots, weights, caches):
    """After token t comes 3 t + 1; the cache notes which tokens a row has read, at their positions."""
    after = (3 * token + 1) % V
    columns = jax.lax.axis_index(AXIS) * (V // RANKS) + jnp.arange(V // RANKS)
    logits = jnp.where(columns[None] == after[:, None], 1.0, 0.0)
    logits = jnp.where((token == NAN_AFTER)[:, None], jnp.nan, logits)
    slots = jnp.arange(caches["S"].shape[-1])
    here = slots[None] == position[:, None]
    return {"logits": logits}, caches | {
        "S": jnp.where(here[None, :, None, None], token[None, :, None, None, None], caches["S"])
    }


def successors(token: int, count: int) -> list[int]:
    tokens = [token]
    for _ in range(count):
        tokens.append((3 * tokens[-1] + 1) % V)
    return tokens[1:]


@pytest.fixture(scope="module")
def cut(golden) -> Cut:
    return Cut(load_config(golden / "k3_tiny_c"), RANKS, "float32")


@pytest.fixture(scope="module")
def engine(cut):
    """Three rows, four steps in a call. The program is traced with the stand-in before the fixture ends."""
    plan, mesh = cut.plan(3, 100), rank_mesh(RANKS)
    program = steps_program(plan, mesh, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megakernel, "decode_step", stand_in)
        yield Engine(cut.model, plan, mesh, {"none": jnp.zeros((RANKS, 1))}, 4, program)


def rows_of(steps) -> list[list[int]]:
    return [[int(token) for token in row if token != ENDED] for row in np.stack(list(steps), axis=1)]


def test_prompts_of_any_length_side_by_side(engine):
    """Shorter than a call, as long, longer: each row goes on alone after its own prompt."""
    prompts = [[5], [9, 8, 7, 6], [1, 2, 3, 4, 5, 6, 11, 12, 13]]
    rows = rows_of(engine.generate(prompts, max_tokens=6))
    assert rows == [successors(prompt[-1], 6) for prompt in prompts]


def test_stop_tokens_end_a_row(engine):
    prompts = [[5], [9, 8, 7, 6, 5, 4], [2]]
    expected = [successors(prompt[-1], 8) for prompt in prompts]
    stop = {expected[0][2], expected[1][5]}
    cut_off = [row[: next((i + 1 for i, t in enumerate(row) if t in stop), 8)] for row in expected]
    assert [len(row) for row in cut_off][:2] == [3, 6]
    assert rows_of(engine.generate(prompts, max_tokens=8, stop=stop)) == cut_off


def test_a_row_that_has_ended_leaves_its_cache(engine):
    """Every token a row has read stands at its position, and nothing after the last."""
    prompts, wide = [[5], [9, 8, 7, 6, 5, 4], [2, 3]], 12
    given = np.full((wide, 3), megakernel.NONE, np.int32)
    for row, prompt in enumerate(prompts):
        given[: len(prompt), row] = prompt
    rows = engine._empty(2)
    sampler = megakernel.Sampler.of([SamplingConfig()] * 3)
    for at in (0, 4):
        _, rows = engine.program(engine.weights, rows, jnp.asarray(given[at : at + 5]), sampler, jnp.array([-9] * 4))
    notes = np.asarray(rows.caches["S"])[1, 0, :, 0, 0]
    for row, prompt in enumerate(prompts):
        read = prompt + successors(prompt[-1], 1)
        assert notes[row].tolist() == read + [0] * (notes.shape[1] - len(read))
        assert rows.position[row] == len(read)


def test_nan_is_an_error(engine):
    with pytest.raises(FloatingPointError, match="row 1: the logits are not numbers"):
        list(engine.generate([[5], [NAN_AFTER], [2]], max_tokens=3))


def test_refusals(engine, cut):
    for prompts, options, message in (
        ([[1]], {}, "expected 3 prompts"),
        ([[1], [], [2]], {}, "at least one token in each"),
        ([[1], [2], [V]], {}, "expected 0..127"),
        ([[1], [2], [3]], {"max_tokens": 256}, r"max_tokens = 256: expected 1..255 after a prompt of 1 tokens"),
        ([[1], [2], [3]], {"sampling": [SamplingConfig()]}, "sampling = 1 configurations"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.generate(prompts, **({"max_tokens": 4} | options))
    with pytest.raises(ConfigError, match="8 cpu devices: expected 9, for which the weights were packed"):
        rank_mesh(9)


# With the kernel


@pytest.fixture(scope="module")
def packed(golden, cut, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "out"
    return pack_checkpoint(open_checkpoint(golden / "k3_tiny_c", cut.model), cut, out, lambda *_: None).directory


def run(packed, **options) -> list[list[int]]:
    done = child("tests.serve.engine_case", [json.dumps({"directory": str(packed)} | options)], RANKS, 600)
    return rows_of(np.array(json.loads(done.stdout.splitlines()[-1])))


@pytest.mark.slow
def test_greedy_tokens_of_the_released_code(packed, expected):
    """24 tokens after a prompt of 17, by the kernel alone, from the golden checkpoint with its widths of 16 to 64."""
    prompt = expected["greedy_prompt"][0].tolist()
    rows = run(packed, prompts=[prompt], capacity=64, steps=8, sampling=[{}], max_tokens=24)
    assert rows == [expected["greedy"].tolist()]


@pytest.mark.slow
def test_equals_the_xla_engine(packed, tiny_c, expected):
    """Two prompts of different lengths, one row greedy and one sampled, with a stop token."""
    prompts = [expected["input_ids"][0, :7].tolist(), expected["input_ids"][1, :3].tolist()]
    sampling = [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}]
    configs = [SamplingConfig(**row) for row in sampling]
    reference = partial(generate, tiny_c, prompts, max_tokens=12, sampling=configs, dtype=jnp.float32)
    stop = reference()[0].tokens[7]
    wanted = [done.tokens + [stop] * (done.finish_reason == "stop") for done in reference(stop={stop})]
    assert len(wanted[0]) <= 8
    rows = run(packed, prompts=prompts, capacity=64, steps=5, sampling=sampling, max_tokens=12, stop=[stop])
    assert rows == wanted
