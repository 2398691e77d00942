"""Expert parallelism against every expert on every token: outputs, all gradients, any routing, both transports."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3_jax.nn.linear import situ
from k3_jax.parallel.expert import routed_experts
from pallas_kernels.common.testing import assert_close, assert_gradients_close, outputs_and_gradients
from tests.parallel.ragged import ragged_transport

S, K, E, L, F = 24, 3, 16, 10, 6  # tokens per rank
ACTIVATION = functools.partial(situ, beta=4.0, linear_beta=25.0)


def choices(kind: str, tokens: int) -> np.ndarray:
    rng = np.random.default_rng(9)
    score = rng.random((tokens, E))
    match kind:
        case "one_expert":
            score[:, 5] += 1
        case "hot_rank":
            score[:, :2] += 1
        case "cold_rank":
            score[:, :2] -= 1
        case "zipf":
            score += 2 / (1 + np.arange(E))
        case "same_for_all":
            score += 2 * rng.random(E)
    return np.argsort(-score, axis=1)[:, :K].astype(np.int32)


ROUTINGS = ("random", "one_expert", "hot_rank", "cold_rank", "zipf", "same_for_all")


def arguments(kind: str, tokens: int, dtype=jnp.float32) -> dict:
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, dtype)  # noqa: E731
    return {
        "z": draw(tokens, L) * tokens**0.5, "p": jnp.asarray(rng.random((tokens, K)), jnp.float32),
        "chosen": jnp.asarray(choices(kind, tokens)), "w1": draw(E, L, F), "w3": draw(E, L, F), "w2": draw(E, F, L),
    }  # fmt: skip


def dense(z, p, chosen, w1, w3, w2):
    weight = jnp.zeros((z.shape[0], E)).at[jnp.arange(z.shape[0])[:, None], chosen].add(p)
    h = ACTIVATION(jnp.einsum("sl,elf->sef", z, w1), jnp.einsum("sl,elf->sef", z, w3))
    return (jnp.einsum("se,sef,efl->sl", weight, h, w2),)


@functools.cache
def sharded(layout: tuple[tuple[str, int], ...], transport: str):
    """The op on a mesh, one function for each transport. Rows lie over all axes but `tensor`, which has F."""
    names, sizes = zip(*layout, strict=True)
    mesh = jax.make_mesh(sizes, names, devices=jax.devices()[: np.prod(sizes)])
    rows = P(tuple(name for name in names if name != "tensor"))
    tensor = "tensor" if "tensor" in names else None
    up, down = P("expert", None, tensor), P("expert", tensor, None)
    specs = (rows, rows, rows, up, up, down)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=rows)
    def local(*operands):
        u = routed_experts(*operands, activation=ACTIVATION, axis="expert")
        return jax.lax.psum(u, tensor) if tensor else u

    def run(*operands):
        return local(*(jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(operands, specs, strict=True)))

    return lambda z, p, chosen, w1, w3, w2: (run(z, p, chosen, w1, w3, w2),)


LAYOUTS = {
    "expert8": (("expert", 8),),
    "data2_expert4": (("data", 2), ("expert", 4)),
    "data2_expert2_tensor2": (("data", 2), ("expert", 2), ("tensor", 2)),
}
TRANSPORTS = {"gathered": contextlib.nullcontext, "ragged": ragged_transport}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "layout", ["expert8", pytest.param("data2_expert4", marks=pytest.mark.slow), "data2_expert2_tensor2"]
)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_all_ranks_together_are_the_dense_layer(routing, layout, transport):
    tokens = S * 8
    given = arguments(routing, tokens)
    cotangents = (np.random.default_rng(3).normal(size=(tokens, L)).astype(np.float32),)
    (expected,), expected_gradients = outputs_and_gradients(dense, given, cotangents)
    with TRANSPORTS[transport]():
        (actual,), gradients = outputs_and_gradients(sharded(LAYOUTS[layout], transport), given, cotangents)
    assert_close("u", actual, expected, 1e-5)
    assert_gradients_close(gradients, expected_gradients, 1e-5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_chunks_that_do_not_divide_the_rows(transport):
    """78 rows per rank travel in two chunks."""
    given, cotangents = arguments("zipf", 26 * 8), (np.ones((26 * 8, L), np.float32),)
    (expected,), expected_gradients = outputs_and_gradients(dense, given, cotangents)
    with TRANSPORTS[transport]():
        (actual,), gradients = outputs_and_gradients(sharded(LAYOUTS["expert8"], transport), given, cotangents)
    assert_close("u", actual, expected, 1e-5)
    assert_gradients_close(gradients, expected_gradients, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16(transport):
    """Products round to bfloat16, sums over a token's experts and over borrowed gradients do not."""
    op, wide = sharded(LAYOUTS["expert8"], transport), arguments("one_expert", S * 8)
    given = {n: x if n in ("p", "chosen") else x.astype(jnp.bfloat16) for n, x in wide.items()}
    cotangents = (np.random.default_rng(3).normal(size=(S * 8, L)).astype(np.float32),)
    exact = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in given.items()}
    (expected,), expected_gradients = outputs_and_gradients(dense, exact, cotangents)
    with TRANSPORTS[transport]():
        (actual,), gradients = outputs_and_gradients(op, given, cotangents)
        parts = [
            jax.jit(lambda p, chosen: op(**(given | {"p": p, "chosen": chosen}))[0])(
                given["p"][:, i : i + 1], given["chosen"][:, i : i + 1]
            )
            for i in range(K)
        ]
    assert actual.dtype == jnp.float32
    assert_close("u", actual, expected, 5e-3)
    assert_gradients_close(gradients, expected_gradients, 1e-2)
    np.testing.assert_allclose(actual, sum(parts), rtol=1e-6, atol=1e-6)
