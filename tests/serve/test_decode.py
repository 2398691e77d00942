"""Decoding against the golden file, the training forward, and itself in other batches and step sizes.

That greedy decoding gives the golden tokens is tested through the command, in tests/unit/test_cli.py.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3_jax.config import ConfigError
from k3_jax.serve import cache_rows
from k3_jax.serve.decode import ENDED, Decoding, decode, decode_steps, generate, stop_array
from k3_jax.serve.prefill import prefill
from k3_jax.serve.sampling import Sampler, SamplingConfig
from tests.serve.compare import assert_close, assert_same

F32 = {"dtype": jnp.float32}
FEW = {"chunk": 16, "steps": 4, "dtype": jnp.float32}
HOT = SamplingConfig(1.0, top_k=20, top_p=0.95, seed=5)


def cached_logits(model, tokens, prompt, chunk):
    """Logits from position `prompt` - 1 on: a prefill of `prompt` tokens, then the given ones one by one."""
    filled = prefill(model, tokens[:, :prompt], model.init_cache(len(tokens), 256, jnp.float32), chunk=chunk, **F32)
    logits = [filled.logits]
    for position in range(prompt, tokens.shape[1]):
        filled = prefill(model, tokens[:, position : position + 1], filled.cache, chunk=1, **F32)
        logits.append(filled.logits)
    return np.stack([np.asarray(x) for x in logits], axis=1)


@pytest.mark.slow  # tests/unit/test_model_golden.py does the same through the layers
def test_cached_decode_equals_the_released_code(tiny_c, expected):
    tokens = expected["input_ids"]
    logits = cached_logits(tiny_c, tokens, 30, chunk=16)
    reference = expected["decode_logits"]
    assert np.abs(logits[:, 1:] - reference).max() <= 5e-4
    assert np.array_equal(logits[:, 1:].argmax(-1), reference.argmax(-1))
    assert np.abs(logits - expected["logits"][:, 29:]).max() <= 5e-4


def test_cached_decode_equals_the_training_forward(model, tokens):
    full = jax.jit(lambda model, tokens: model(tokens, None, jnp.float32))(model, tokens)
    assert_close(cached_logits(model, tokens, 100, chunk=16), full[:, 99:])


@pytest.fixture(scope="module")
def prompts(tokens):
    return [tokens[0, 20:60].tolist(), tokens[1, :1].tolist()]


@pytest.fixture(scope="module")
def batch(model, prompts):
    return generate(model, prompts, max_tokens=20, sampling=HOT, **FEW)


@pytest.mark.slow
def test_a_sample_depends_on_prompt_and_seed_only(model, prompts, batch):
    """Not on the batch, the chunks of the prefill, or the steps per call."""
    for prompt, together in zip(prompts, batch, strict=True):
        assert generate(model, [prompt], max_tokens=20, sampling=HOT, chunk=7, steps=3, **F32) == [together]
    assert generate(model, prompts, max_tokens=20, sampling=replace(HOT, seed=6), **FEW) != batch


def test_rows_may_sample_differently(model, prompts, batch):
    greedy = SamplingConfig()
    mixed = generate(model, prompts, max_tokens=20, sampling=[greedy, HOT], **FEW)
    assert mixed[1] == batch[1]
    assert mixed[0] == generate(model, prompts, max_tokens=20, **FEW)[0] != batch[0]


def test_stop_tokens_end_rows_one_by_one(model, prompts, batch):
    stop = {batch[0].tokens[3], batch[1].tokens[9]}
    stopped = generate(model, prompts, max_tokens=20, sampling=HOT, stop=stop, **FEW)
    for row, whole in zip(stopped, batch, strict=True):
        end = next((i for i, token in enumerate(whole.tokens) if token in stop), None)
        assert row.tokens == whole.tokens[:end]
        assert row.finish_reason == ("length" if end is None else "stop")
    assert stopped[0].finish_reason == "stop" and len(stopped[0].tokens) <= 3


def test_max_tokens_of_one(model, prompts, batch):
    first = generate(model, prompts, max_tokens=1, sampling=HOT, **FEW)
    assert [row.tokens for row in first] == [row.tokens[:1] for row in batch]


def test_an_ended_row_keeps_its_cache(model, tokens, new_cache):
    cache = prefill(model, tokens[:, :20], new_cache(2), chunk=16, **F32).cache
    kept = cache_rows.select(cache, [0])
    alive = jnp.asarray([False, True])
    state = Decoding(cache, jnp.asarray([3, 3], jnp.int32), alive, jnp.asarray([9, 9], jnp.int32))
    state = jax.device_put(state, jax.devices()[0])
    out, state = decode_steps(model, state, Sampler.of([HOT, HOT]), stop_array(()), steps=4, dtype=jnp.float32)
    assert np.all(np.asarray(out)[:, 0] == ENDED) and np.all(np.asarray(out)[:, 1] >= 0)
    assert_same(cache_rows.select(state.cache, [0]), kept)
    assert state.cache.lengths.tolist() == [20, 24] and state.left.tolist() == [9, 5]


def test_a_cache_without_tokens_gives_none(model, tokens, new_cache):
    filled = prefill(model, tokens[:, :20], new_cache(2), lengths=[0, 20], chunk=16, **F32)
    rows = list(decode(model, filled.logits, filled.cache, max_tokens=3, steps=4, **F32))
    assert all(row[0] == ENDED and row[1] >= 0 for row in rows) and len(rows) == 3


def test_nan_is_an_error_with_its_position(model, tokens, new_cache):
    filled = prefill(model, tokens[:, :20], new_cache(2), chunk=16, **F32)
    stream = decode(model, filled.logits.at[1, 3].set(jnp.nan), filled.cache, max_tokens=3, **F32)
    with pytest.raises(FloatingPointError, match="row 1: the logits at position 20 are not numbers"):
        list(stream)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_tokens": 238}, "capacity of 256"),
        ({"max_tokens": 401}, "capacity of 256"),
        ({"max_tokens": 3, "sampling": [HOT]}, "sampling = 1 configurations: expected one, or one for each of 2 rows"),
    ],
)
def test_errors_come_before_the_first_token(model, tokens, new_cache, change, message):
    cache = replace(new_cache(2), lengths=jnp.asarray([20, 20], jnp.int32))
    with pytest.raises(ConfigError, match=message):
        decode(model, jnp.zeros((2, 50)), cache, **F32, **change)


def test_more_tokens_than_positions(model, new_cache):
    cache = replace(new_cache(1, 512), lengths=jnp.asarray([20], jnp.int32))
    with pytest.raises(ConfigError, match="max_tokens = 381 after 20 tokens: expected at most max_positions = 400"):
        decode(model, jnp.zeros((1, 50)), cache, max_tokens=381, **F32)


def test_empty_prompts(model):
    for prompts in ([], [[1], []]):
        with pytest.raises(ConfigError, match="prompts"):
            generate(model, prompts, max_tokens=1)
