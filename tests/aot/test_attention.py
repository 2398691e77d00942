"""The attention kernels at K3's widths for three TPU generations, packed documents included: VMEM suffices, and
nothing of size T x T is in the program."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention.api import mla_attention
from pallas_kernels.common import aot

N, R, V = 128, 64, 128
TOPOLOGIES = ["v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1"]
CASES = [(8192, 96, "bfloat16"), (8192, 2, "float32"), (131072, 2, "bfloat16"), (262144, 2, "bfloat16")]


def flat_attention(heads, q_nope, q_pe, kv, k_pe, segment_ids):
    """Arguments as projections leave them: heads side by side."""
    parts = (x.reshape(*x.shape[:2], heads, -1) for x in (q_nope, q_pe, kv))
    scale = (N + R) ** -0.5
    o, peak = mla_attention(*parts, k_pe, segment_ids, scale=scale, implementation="pallas")
    return o.reshape(*o.shape[:2], -1), peak


def forward_backward(heads, do, *arguments):
    *arrays, segment_ids = arguments
    run = lambda *arrays: flat_attention(heads, *arrays, segment_ids)  # noqa: E731
    o, pullback, peak = jax.vjp(run, *arrays, has_aux=True)
    return o, peak, pullback(do)


@pytest.mark.parametrize(("T", "heads", "dtype"), CASES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_forward_and_backward(facts, topology, T, heads, dtype):
    mesh = aot.mesh_for(topology, x=1)
    rows = lambda width: aot.abstract((1, T, width), jnp.dtype(dtype), mesh)  # noqa: E731
    arguments = [rows(heads * V), rows(heads * N), rows(heads * R), rows(heads * (N + V)), rows(R)]
    segment_ids = aot.abstract((1, T), jnp.int32, mesh)
    lowered = aot.lower_for(functools.partial(forward_backward, heads), *arguments, segment_ids, mesh=mesh)
    name = f"attention_T{T}_H{heads}{'_f32' * (dtype == 'float32')}_{topology.partition(':')[0]}"
    report = facts.check(name, lowered, topology)
    assert report.custom_calls["tpu_custom_call"] == 2
    # Beside the results: statistics of each head and query, partial gradients of the extra keys; and where the kernel
    # runs for every span of queries, the keys' gradients in float32 and the queries' once more. Far below T x T.
    per_token_and_head = 2 * 8 * 4 + 4 * R
    per_token_and_head += 4 * (N + V + R) + 2 * 2 * (N + R) if T > 8192 else 0
    assert report.temp_bytes < 1.1 * T * heads * per_token_and_head + 2**24
