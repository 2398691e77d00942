"""The whole text model against outputs of the released model code, computed in float32 by others."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import extend, load_golden, outputs_of

# Two float32 builds of the released code differ by 6e-5.
TOLERANCE = 5e-4
GOLDEN = ("k3_tiny_c", "k3_tiny_a")


@pytest.fixture(scope="module", params=GOLDEN)
def case(request):
    """(model, expected) of a golden checkpoint: one in the repository, one in the shared folder."""
    if request.param == "k3_tiny_c":
        folder = request.getfixturevalue("golden") / request.param
    else:
        folder = request.getfixturevalue("shared") / "golden" / request.param
    model, _, expected = load_golden(folder)
    return model, expected


@pytest.fixture(scope="module")
def outputs(case):
    model, expected = case
    return tuple(np.asarray(x) for x in outputs_of(model, jnp.asarray(expected["input_ids"], jnp.int32)))


def test_logits(case, outputs):
    logits, expected = outputs[0], case[1]["logits"]
    assert np.abs(logits - expected).max() <= TOLERANCE
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


def test_running_sum_after_every_layer(case, outputs):
    model, expected = case
    for layer in range(model.config.num_layers):
        error = np.abs(outputs[1][layer] - expected[f"layer{layer}"]).max()
        assert error <= TOLERANCE, f"layer {layer}: {error}"


@pytest.fixture(scope="module")
def run(case):
    """Prefill of a prompt [2, n], then single tokens: `run(prompt, choose, steps)` gives [2, steps, V].

    One shape of prefill serves all prompts: shorter ones are padded on the right.
    """
    model, expected = case
    length = expected["input_ids"].shape[1]
    width = length - expected["decode_logits"].shape[1] + 1

    def run(prompt, choose, steps):
        missing = width - prompt.shape[1]
        valid = jnp.pad(jnp.zeros_like(prompt), ((0, 0), (0, missing)), constant_values=-1)
        cache = model.init_cache(2, max(length, 48), jnp.float32)
        logits, cache = extend(model, jnp.pad(prompt, ((0, 0), (0, missing))), valid, cache)
        out = [logits[:, prompt.shape[1] - 1]]
        while len(out) < steps:
            token = jnp.asarray(choose(prompt.shape[1] + len(out) - 1, out[-1]), jnp.int32)
            logits, cache = extend(model, token[:, None], jnp.zeros((2, 1), jnp.int32), cache)
            out.append(logits[:, 0])
        np.testing.assert_array_equal(cache.lengths, [prompt.shape[1] + steps - 1] * 2)
        return np.stack(out, axis=1)

    return run


def test_prefill_and_cached_decode(case, run):
    """decode_logits[:, 0] is the last position of the prefill; each later position is one cached step."""
    expected = case[1]["decode_logits"]
    tokens = jnp.asarray(case[1]["input_ids"], jnp.int32)
    steps = expected.shape[1]
    logits = run(tokens[:, : tokens.shape[1] - steps + 1], lambda position, _: tokens[:, position], steps)
    assert np.abs(logits - expected).max() <= TOLERANCE
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


def test_greedy_continuation(case, run):
    prompt, expected = case[1]["greedy_prompt"], case[1]["greedy"]
    logits = run(jnp.asarray(prompt, jnp.int32).repeat(2, 0), lambda _, logits: logits.argmax(-1), len(expected))
    np.testing.assert_array_equal(logits.argmax(-1), np.stack([expected] * 2))
