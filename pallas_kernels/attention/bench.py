"""What `k3 bench attention` measures: attention of Gated MLA as a layer calls it, forward and with its gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.attention.api import mla_attention
from pallas_kernels.common import aot


@dataclass(frozen=True)
class Case:
    """Sizes of one benchmark: batch, tokens, heads; widths of nope and extra part of keys, and of values."""

    B: int
    T: int
    H: int
    N: int = 128
    R: int = 64
    V: int = 128
    dtype: str = "bfloat16"

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        rows, dtype = (self.B, self.T, self.H), jnp.dtype(self.dtype)
        made = {"q_nope": (*rows, self.N), "q_pe": (*rows, self.R), "kv": (*rows, self.N + self.V)}
        made["k_pe"] = (self.B, self.T, self.R)
        return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in made.items()}


def forward(case: Case, implementation: str) -> Callable:
    """A function of q_nope, q_pe, kv, k_pe; heads are side by side, as projections leave them."""

    def run(q_nope, q_pe, kv, k_pe):
        parts = (x.reshape(case.B, case.T, case.H, -1) for x in (q_nope, q_pe, kv))
        scale = (case.N + case.R) ** -0.5
        if implementation == "splash":
            return splash(*parts, k_pe, scale).reshape(case.B, case.T, -1)
        return mla_attention(*parts, k_pe, scale=scale, implementation=implementation)[0].reshape(case.B, case.T, -1)

    return run


def splash(q_nope, q_pe, kv, k_pe, scale):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    B, T, H, N = q_nope.shape
    q = jnp.concatenate([q_nope, q_pe], axis=-1) * jnp.asarray(scale, q_nope.dtype)
    k = jnp.concatenate([kv[..., :N], jnp.broadcast_to(k_pe[:, :, None], (B, T, H, k_pe.shape[-1]))], axis=-1)
    sizes = kernel.BlockSizes(
        block_q=1024,
        block_kv=1024,
        block_kv_compute=1024,
        block_q_dkv=1024,
        block_kv_dkv=1024,
        block_kv_dkv_compute=1024,
        use_fused_bwd_kernel=False,
        block_q_dq=1024,
        block_kv_dq=1024,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((T, T)) for _ in range(H)])
    attend = kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    rows = (jnp.moveaxis(x, 1, 2) for x in (q, k, kv[..., N:]))
    return jnp.moveaxis(jax.vmap(attend)(*rows), 1, 2)


def lower(topology: str, shape: Sequence[int], implementation: str, backward: bool) -> jax.stages.Lowered:
    """The forward (or forward and backward) program for one device of a TPU topology. `shape` is B, T, H."""
    case = Case(*shape)
    mesh = aot.mesh_for(topology, device=1)
    run = forward(case, implementation)

    def step(do, *arguments):
        o, pullback = jax.vjp(run, *arguments)
        return o, pullback(do)

    flat = {
        n: x if n == "k_pe" else jax.ShapeDtypeStruct((case.B, case.T, case.H * x.shape[-1]), x.dtype)
        for n, x in case.shapes().items()
    }
    arguments = list(flat.values())
    if backward:
        arguments.insert(0, jax.ShapeDtypeStruct((case.B, case.T, case.H * case.V), jnp.dtype(case.dtype)))
    return aot.lower_for(
        step if backward else run, *(aot.abstract(x.shape, x.dtype, mesh) for x in arguments), mesh=mesh
    )
