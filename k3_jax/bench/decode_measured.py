"""Tokens per second of the XLA decode path (`k3_jax.serve.decode`) with random weights: a figure to see regressions."""

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3_jax.bench import report
from k3_jax.config import ConfigError
from k3_jax.nn.transformer import K3
from k3_jax.recipe import load_recipe
from k3_jax.serve.decode import GREEDY, Decoding, decode_steps, room, stop_array
from k3_jax.serve.sampling import Sampler


def measure(config: str, rows: int, context: int, steps: int, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` calls of `steps` greedy steps each, from `context` tokens on; caches of zeros cost the same
    as full ones."""
    recipe = load_recipe(config).model
    if (end := context + steps * (repeats + 1)) > recipe.max_positions:
        raise ConfigError(f"--context = {context}: expected at most {recipe.max_positions - end + context}")
    report.progress(f"{config}: compiling {steps} steps of {rows} rows")
    model = nnx.jit(lambda: K3(recipe, rngs=nnx.Rngs(0), dtype=jnp.float32))()
    cache = model.init_cache(rows, room(end), jnp.float32)
    cache = dataclasses.replace(cache, lengths=jnp.full((rows,), context, jnp.int32))
    full = lambda value, dtype: jnp.full((rows,), value, dtype)  # noqa: E731
    state = Decoding(cache, full(0, jnp.int32), full(True, bool), full(np.iinfo(np.int32).max, jnp.int32))
    seconds = []
    sampler, stop = Sampler.of([GREEDY] * rows), stop_array(())
    for _ in range(repeats + 1):
        start = time.perf_counter()
        tokens, state = jax.block_until_ready(decode_steps(model, state, sampler, stop, steps=steps, dtype=jnp.float32))
        seconds.append(time.perf_counter() - start)
    if np.any(np.asarray(tokens) < 0):
        raise FloatingPointError("logits that are not numbers, or a row that ended")
    first, *rest = seconds
    step = statistics.median(rest) / steps
    return {
        "config": config,
        "batch": rows,
        "context": context,
        "device": jax.devices()[0].device_kind,
        "tokens_per_s": rows / step,
        "median_step_ms": 1e3 * step,
        "min_step_ms": 1e3 * min(rest) / steps,
        "compile_s": first - statistics.median(rest),
        "steps_per_call": steps,
        "calls": repeats,
    }
