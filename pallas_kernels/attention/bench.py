"""What `k3 bench attention` compiles: attention of Gated MLA as a layer calls it, ours and the Splash kernel of JAX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jaxtyping import Array, Float

from pallas_kernels.attention.api import mla_attention
from pallas_kernels.attention.blocks import HEADS, backward_flops, causal_pairs, forward_flops
from pallas_kernels.attention.pallas import BLOCK as BLOCKS
from pallas_kernels.attention.pallas import SPAN
from pallas_kernels.attention.steps import STEADY
from pallas_kernels.common import aot

Competitor = Literal["pallas", "splash"]
# What every word of the kernels' tables of steps is taken for: a step without a mask. Splash's are bytes.
TABLE = {"pallas": STEADY, "splash": 0x02020202}
HEADS_PER_STEP = {"pallas": HEADS, "splash": 1}
BLOCK = BLOCKS[2]  # in bfloat16


@dataclass(frozen=True)
class Case:
    """Sizes of one benchmark: batch, tokens, heads; widths of nope and extra part of keys, and of values."""

    B: int
    T: int
    H: int
    N: int = 128
    R: int = 64
    V: int = 128

    def __post_init__(self):
        if min(self.B, self.H) < 1 or self.T % BLOCK or not BLOCK <= self.T <= SPAN:
            raise ValueError(
                f"shape = {self.B},{self.T},{self.H}: expected positive sizes, T a multiple of {BLOCK} up to {SPAN}"
            )

    def steps(self, competitor: Competitor) -> int:
        """Grid steps in which blocks attend, in all rows and heads."""
        blocks = self.T // BLOCK
        return self.B * -(-self.H // HEADS_PER_STEP[competitor]) * blocks * (blocks + 1) // 2

    @property
    def widths(self) -> dict[str, int]:
        """Of the arguments as projections leave them: heads side by side."""
        heads = {"q_nope": self.N, "q_pe": self.R, "kv": self.N + self.V}
        return {name: self.H * width for name, width in heads.items()} | {"k_pe": self.R}


def operations(case: Case, backward: bool) -> int:
    """Multiplications and additions of the matrix products over pairs that attend."""
    key = case.N + case.R
    per_pair = forward_flops(key, case.V) + (backward_flops(key, case.V) if backward else 0)
    return case.B * case.H * causal_pairs(case.T, case.T) * per_pair


def lower(topology: str, shape: Sequence[int], competitor: Competitor, backward: bool) -> jax.stages.Lowered:
    """The forward (or forward and backward) program for one device of a TPU topology. `shape` is B, T, H."""
    case, mesh = Case(*shape), aot.mesh_for(topology, device=1)
    run = _flat(case, ours if competitor == "pallas" else splash)
    arguments = [aot.abstract((case.B, case.T, width), jnp.bfloat16, mesh) for width in case.widths.values()]
    if not backward:
        return aot.lower_for(run, *arguments, mesh=mesh)

    def step(do, *arguments):
        o, pullback = jax.vjp(run, *arguments)
        return o, pullback(do)

    do = aot.abstract((case.B, case.T, case.H * case.V), jnp.bfloat16, mesh)
    return aot.lower_for(step, do, *arguments, mesh=mesh)


def _flat(case: Case, attend: Callable) -> Callable:
    def run(q_nope, q_pe, kv, k_pe):
        heads = (x.reshape(case.B, case.T, case.H, -1) for x in (q_nope, q_pe, kv))
        return attend(*heads, k_pe, (case.N + case.R) ** -0.5).reshape(case.B, case.T, -1)

    return run


def ours(q_nope, q_pe, kv, k_pe, scale: float) -> Float[Array, "B T H V"]:
    return mla_attention(q_nope, q_pe, kv, k_pe, scale=scale, implementation="pallas")[0]


def splash(q_nope, q_pe, kv, k_pe, scale: float) -> Float[Array, "B T H V"]:
    """With blocks as large as ours. It wants heads before tokens, keys whole, and queries already scaled."""
    (B, T, H, N), sizes = q_nope.shape, splash_attention_kernel.BlockSizes(*[BLOCK] * 8, use_fused_bwd_kernel=False)
    q = jnp.concatenate([q_nope, q_pe], axis=-1) * jnp.asarray(scale, q_nope.dtype)
    k = jnp.concatenate([kv[..., :N], jnp.broadcast_to(k_pe[:, :, None], (B, T, H, k_pe.shape[-1]))], axis=-1)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T)) for _ in range(H)])
    attend = splash_attention_kernel.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    rows = (jnp.moveaxis(x, 1, 2) for x in (q, k, kv[..., N:]))
    return jnp.moveaxis(jax.vmap(attend)(*rows), 1, 2)
