"""What only a Pallas kernel can get wrong: races, memory that nobody wrote, manual meshes, precision of products.

Under jax.checkpoint and jax.vmap the interpreter cannot run it; tests/aot compiles it there.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3_jax.config import MeshConfig
from k3_jax.mesh import make_mesh
from pallas_kernels.common.testing import equations, relative_rms
from pallas_kernels.kda import chunk_kda, kda_from_raw_gate, kda_gate, recurrent_kda

pytestmark = pytest.mark.usefixtures("interpreted")
BOUND = -5.0


@pytest.fixture
def interpreted():
    with pltpu.force_tpu_interpret_mode():
        yield
    pltpu.reset_tpu_interpret_mode_state()


def inputs(B=2, T=80, H=2, HV=2, K=16, V=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(B, T, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, g, beta = rng.normal(size=(B, T, HV, V)), BOUND * rng.random((B, T, HV, K)), rng.random((B, T, HV))
    arrays = (*(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.asarray(g, jnp.float32), jnp.asarray(beta, jnp.float32))
    ids = np.zeros((B, T), np.int32)
    ids[0, 30:], ids[0, 70:], ids[-1, :5] = 1, -1, -1
    return arrays, jnp.asarray(ids)


def loss(implementation, *arrays, segment_ids, bound=BOUND):
    o, S = chunk_kda(*arrays, segment_ids=segment_ids, gate_lower_bound=bound, implementation=implementation)
    return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(S**2)


def gradients(implementation, arrays, ids, bound=BOUND):
    return jax.jit(jax.value_and_grad(lambda a: loss(implementation, *a, segment_ids=ids, bound=bound)))(arrays)


def assert_same(actual, expected):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_rms(np.asarray(x), np.asarray(y)) < 2e-5


RAW_LIMITS = {
    "float32": dict.fromkeys(range(7), 1e-4),
    "bfloat16": {0: 8e-3, 1: 8e-3, 2: 8e-3, 3: 2e-2, 4: 2e-2, 5: 2e-2, 6: 4e-2},
}


@pytest.mark.parametrize("bound", [BOUND, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_gate_inside_the_kernel(dtype, bound):
    """Values and the gradients of q, k, v, z, beta, A_log and dt_bias, against the recurrence with `kda_gate`."""
    (q, k, v, _, beta), ids = inputs(B=2, T=80, H=1, HV=2, dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(1)
    z, A_log, dt_bias = 2 * rng.normal(size=(2, 80, 2, 16)), 0.3 * rng.normal(size=2), rng.normal(size=(2, 16)) - 1
    arrays = q, k, v, jnp.asarray(z, dtype), beta, jnp.asarray(A_log, jnp.float32), jnp.asarray(dt_bias, jnp.float32)

    def run(op, arrays):
        def loss(arrays):
            o, S = op(arrays)
            return jnp.sum(jnp.sin(o.astype(jnp.float32))) + jnp.sum(S**2)

        return jax.jit(jax.value_and_grad(loss))(arrays)

    def raw(x):
        return kda_from_raw_gate(*x, segment_ids=ids, gate_lower_bound=bound, implementation="pallas")

    def definition(x):
        q, k, v, z, beta, A_log, dt_bias = x
        return chunk_kda(q, k, v, kda_gate(z, A_log, dt_bias, bound), beta, segment_ids=ids, implementation="reference")

    value, actual = run(raw, arrays)
    expected_value, expected = run(definition, tuple(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_allclose(value, expected_value, rtol=1e-4 if dtype == "float32" else 1e-2)
    for i, limit in RAW_LIMITS[dtype].items():
        assert relative_rms(np.asarray(actual[i]).astype(np.float32), np.asarray(expected[i])) < limit, i
    assert [x.dtype for x in actual] == [x.dtype for x in arrays]


def test_inside_shard_map():
    arrays, ids = inputs(B=2, HV=4, H=2)
    specs = (*(P("data", None, "tensor", *(None,) * (x.ndim - 3)) for x in arrays), P("data"))

    def shard(*a):
        arrays, ids = a[:-1], a[-1]
        part = loss("pallas", *arrays, segment_ids=ids)
        return jax.lax.psum(part, ("data", "tensor"))

    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])):
        total = jax.shard_map(shard, in_specs=specs, out_specs=P())
        mesh, flat = jax.sharding.get_mesh(), (*arrays, ids)
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(flat, specs, strict=True)]
        actual = jax.device_get(jax.jit(jax.value_and_grad(lambda a, i: total(*a, i)))(tuple(placed[:-1]), placed[-1]))
    assert_same(actual, gradients("xla", arrays, ids))


@pytest.mark.parametrize("dma_execution_mode", ["eager", pytest.param("on_wait", marks=pytest.mark.slow)])
@pytest.mark.parametrize("bound", [BOUND, pytest.param(None, marks=pytest.mark.slow)])
def test_without_races_and_with_unset_memory_nan(bound, dma_execution_mode):
    arrays, ids = inputs(B=1, T=130, H=1, HV=2)
    params = pltpu.InterpretParams(
        detect_races=True, on_race="raise", uninitialized_memory="nan", dma_execution_mode=dma_execution_mode
    )
    with pltpu.force_tpu_interpret_mode(params):
        actual = jax.block_until_ready(gradients("pallas", arrays, ids, bound))
    assert_same(actual, gradients("xla", arrays, ids, bound))


@pytest.mark.parametrize("dma_execution_mode", ["eager", "on_wait"])
def test_decode_without_races_and_with_unset_memory_nan(dma_execution_mode):
    arrays, ids = inputs(B=2, T=3, H=2, HV=4)
    state = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, 16, 16)), jnp.float32)
    params = pltpu.InterpretParams(
        detect_races=True, on_race="raise", uninitialized_memory="nan", dma_execution_mode=dma_execution_mode
    )
    run = lambda implementation: recurrent_kda(  # noqa: E731
        *arrays, initial_state=state, segment_ids=ids, implementation=implementation
    )
    with pltpu.force_tpu_interpret_mode(params):
        actual = jax.block_until_ready(run("pallas"))
    assert_same(actual, run("reference"))


@pytest.mark.parametrize("bound", [BOUND, None])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_precision_of_products(dtype, bound):
    """float32 operands ask for full precision; whatever the operands are, sums and the state are float32."""
    arrays, ids = inputs(dtype=dtype)
    jaxpr = jax.make_jaxpr(jax.grad(lambda a: loss("pallas", *a, segment_ids=ids, bound=bound)))(arrays).jaxpr
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) > 20
    for e in products:
        assert e.outvars[0].aval.dtype == jnp.float32
        kinds = {x.aval.dtype for x in e.invars}
        assert len(kinds) == 1, "a product of mixed types"
        if kinds == {jnp.dtype("float32")}:
            assert e.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
    assert dtype == jnp.bfloat16 or all(x.aval.dtype == jnp.float32 for e in products for x in e.invars)


def test_heads_of_more_than_256_channels_are_refused():
    arrays, _ = inputs(T=16, K=257)
    with pytest.raises(ValueError, match=r"k.shape = .*257.*expected K, V <= 256"):
        chunk_kda(*arrays, implementation="pallas")
