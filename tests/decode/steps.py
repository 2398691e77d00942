"""What a case's process does: steps of the kernel and of the reference, from the same caches, and their differences."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from k3_jax.serve.pack import pack
from pallas_kernels.decode import AXIS, Plan, decode_program, independent, reference
from pallas_kernels.decode.caches import from_ranks, to_ranks
from tests.decode.case import Case
from tests.decode.model import kernel_config, model_config, weights


def random_caches(plan: Plan, seed: int = 1) -> reference.Caches:
    """As if tokens had been there before."""
    rng, c = np.random.default_rng(seed), plan.config
    of = lambda x, size: jnp.asarray(rng.normal(size=x.shape) * size, c.dtype).astype(jnp.float32)  # noqa: E731
    empty = reference.empty_caches(c)
    return reference.Caches(of(empty.S, 0.1), of(empty.conv, 1.0), of(empty.latent, 1.0))


def compare(case: Case) -> dict:
    model = model_config(case.layers, case.ranks)
    config = kernel_config(
        model,
        ranks=case.ranks,
        rows=case.rows,
        capacity=max(64, 16 * case.cache_ranks),
        cache_ranks=case.cache_ranks,
        blocks={"whole_sum_bytes": case.whole_sum_bytes, "banks": max(1, min(3, 16 // case.ranks))},
        dtype=getattr(jnp, case.dtype),
    )
    plan = Plan(config)
    named = {name: x * case.router if name.endswith("moe.router") else x for name, x in weights(model).items()}
    packed = pack(plan, named)
    run = decode_program(plan, Mesh(np.array(jax.devices()), (AXIS,)), steps=case.per_call)
    expected = jax.jit(partial(reference.step, slots=independent(case.rows), config=config, dtype=config.dtype))
    caches = before = random_caches(plan)
    ranks, position = to_ranks(plan, caches), jnp.array(case.start, jnp.int32)
    given = token = jnp.array(case.tokens, jnp.int32)
    live = np.array(case.start) >= 0
    report = {"tokens": [], "expected": [], "margins": [], "alike": True}
    errors = dict.fromkeys(("logits", "S", "conv", "latent"), 0.0)
    params = pltpu.InterpretParams(dma_execution_mode=case.mode, detect_races=case.races, on_race="warn")
    with pltpu.force_tpu_interpret_mode(params):
        for _ in range(case.steps // case.per_call):
            tokens, logits, ranks = run(packed, ranks, token, position)
            report["tokens"] += np.asarray(tokens)[:, live].tolist()
            report["alike"] &= all(np.array_equal(tokens, x.data) for x in tokens.addressable_shards)
            token = tokens[-1]
            for _ in range(case.per_call):
                wanted, caches = expected(named, caches, given, position)
                best = np.sort(np.asarray(wanted), axis=1)[live]
                given = wanted.argmax(1).astype(jnp.int32)
                report["expected"].append(np.asarray(given)[live].tolist())
                report["margins"].append((best[:, -1] - best[:, -2]).tolist())
                position = jnp.where(position < 0, position, position + 1)
            now = from_ranks(plan, jax.tree.map(jnp.asarray, jax.device_get(ranks)))
            pairs = {"logits": (np.asarray(logits)[live], np.asarray(wanted)[live])}
            pairs |= {name: (getattr(now, name), getattr(caches, name)) for name in ("S", "conv", "latent")}
            for name, (a, b) in pairs.items():
                errors[name] = max(errors[name], float(np.abs(np.asarray(a) - np.asarray(b)).max()))
    same = [np.array_equal(getattr(now, x)[:, ~live], getattr(before, x)[:, ~live]) for x in ("S", "conv", "latent")]
    races = interpret_pallas_call.races
    found = bool(races is not None and races.races_found)
    return report | {"errors": errors, "untouched": all(same), "races": found}
