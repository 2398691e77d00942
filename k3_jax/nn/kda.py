"""Kimi Delta Attention (report §2.1.1): short convolutions, the delta rule with a per-channel decay, a gated output.

B batch, T positions, H heads, K = V = head_dim, W taps of the convolution, D model width, R rank of the decay gate.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax import sharding
from k3_jax.config import K3Config
from k3_jax.nn.activations import named
from k3_jax.nn.init import normal, ones, uniform, zeros
from k3_jax.nn.linear import param, project
from k3_jax.nn.norm import gated_rms_norm, l2_norm
from k3_jax.parallel.context import context_kda, halo, of_last_live
from k3_jax.parallel.fragments import layout_in_use
from pallas_kernels.kda import kda_from_raw_gate, kda_gate, recurrent_kda


@partial(jax.tree_util.register_dataclass, data_fields=["S", "conv"], meta_fields=[])
@dataclass(frozen=True)
class KDAState:
    """What a sequence carries on: the state (key channels first) and the last W - 1 inputs of the convolutions."""

    S: Float[Array, "*s B H K V"]  # float32
    conv: Float[Array, "*s B W 3 H K"]  # W - 1 rows of q, k, v before convolution and SiLU; the last is the newest


def init_state(config: K3Config, batch: int, dtype: DTypeLike) -> KDAState:
    H, K, W = config.kda.num_heads, config.kda.head_dim, config.kda.conv_width
    S = sharding.place(jnp.zeros((batch, H, K, K), jnp.float32), sharding.active("BHKV"))
    conv = sharding.place(jnp.zeros((batch, W - 1, 3, H, K), dtype), sharding.active("BW_HK"))
    return KDAState(S, conv)


def short_conv(
    u: Float[Array, "B T H K"],
    weight: Float[Array, "W H K"],
    segment_ids: Int[Array, "B T"],
    context: Float[Array, "B W1 H K"],
    context_ids: Int[Array, "B W1"],
) -> Float[Array, "B T H K"]:
    """y_t = SiLU(sum_j w_j u_{t-W+1+j}) in float32, where taps outside t's document count as zero.

    `context` holds the W - 1 inputs before the row, and `context_ids` their documents.
    """
    W, T = weight.shape[0], u.shape[1]
    ids = jnp.concatenate([context_ids, segment_ids], axis=1)
    padded = jnp.concatenate([context.astype(u.dtype), u], axis=1)
    y = jnp.zeros(u.shape, jnp.float32)
    for j in range(W):
        same = (ids[:, j : j + T] == segment_ids) & (segment_ids >= 0)
        tap = jnp.where(same[:, :, None, None], padded[:, j : j + T].astype(jnp.float32), 0.0)
        y = y + tap * weight[j].astype(jnp.float32)[None, None]
    return jax.nn.silu(y).astype(u.dtype)


def conv_context(
    u: Float[Array, "B T C H K"], segment_ids: Int[Array, "B T"], context: Float[Array, "B W1 C H K"]
) -> Float[Array, "B W1 C H K"]:
    """The last W - 1 inputs after this row, whose live positions come first and padding (ids < 0) after them."""
    length = jnp.sum(segment_ids >= 0, axis=1)
    joined = jnp.concatenate([context, u.astype(context.dtype)], axis=1)
    take = length[:, None] + jnp.arange(context.shape[1])[None]
    return jax.vmap(lambda row, index: row[index])(joined, take)


class KDA(nnx.Module):
    def __init__(self, config: K3Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        init = normal(config.init_std)
        D, H, K, W = config.hidden_size, config.kda.num_heads, config.kda.head_dim, config.kda.conv_width
        self.config = config
        self.q = param(rngs, init, (D, H, K), "DHK", dtype)
        self.k = param(rngs, init, (D, H, K), "DHK", dtype)
        self.v = param(rngs, init, (D, H, K), "DHK", dtype)
        self.g = param(rngs, init, (D, H, K), "DHK", dtype)
        self.o = param(rngs, init, (H, K, D), "HKD", dtype)
        self.b = param(rngs, init, (D, H), "DH", dtype)
        self.f_a = param(rngs, init, (D, K), "D_", dtype)
        self.f_b = param(rngs, init, (K, H, K), "_HK", dtype)
        self.q_conv = param(rngs, _conv_init, (W, H, K), "_HK")
        self.k_conv = param(rngs, _conv_init, (W, H, K), "_HK")
        self.v_conv = param(rngs, _conv_init, (W, H, K), "_HK")
        self.A_log = param(rngs, zeros, (H,), "H")
        self.dt_bias = param(rngs, _dt_bias_init, (H, K), "HK")
        self.o_norm = param(rngs, ones, (K,), "_")

    def __call__(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"], state: KDAState
    ) -> tuple[Float[Array, "B T D"], KDAState]:
        """The layer's output and the state after the row. A change of `segment_ids` resets both kinds of state;
        negative ids are padding, which touches neither."""
        head = partial(project, "btd,dhk->bthk", x, letters="DHK", out="BTHK")
        u = named("kda_qkv", jnp.stack([head(self.q), head(self.k), head(self.v)], axis=2))
        z = project("btr,rhk->bthk", project("btd,dr->btr", x, self.f_a, "D_", "BT_"), self.f_b, "_HK", "BTHK")
        beta = jax.nn.sigmoid(project("btd,dh->bth", x, self.b, "DH", "BTH").astype(jnp.float32))
        weights = (self.q_conv[...], self.k_conv[...], self.v_conv[...], self.A_log[...], self.dt_bias[...])
        mix = sharding.local(
            partial(_mix, lower_bound=self.config.kda.gate_lower_bound),
            ("BT_HK", "BTHK", "BTH", "BT", KDAState("BHKV", "BW_HK"), ("_HK", "_HK", "_HK", "H", "HK")),
            ("BTHK", KDAState("BHKV", "BW_HK")),
        )
        o, state = mix(u, z, beta, segment_ids, state, weights)
        y = gated_rms_norm(named("kda_output", o), head(self.g), self.o_norm[...], self.config.norm_eps)
        return project("bthk,hkd->btd", y, self.o, "HKD", "BTD"), state


def _mix(u, z, beta, segment_ids, state: KDAState, weights, *, lower_bound: float | None):
    """Convolutions, gate and delta rule on one device's rows and heads; fragments of cut rows are rows here."""
    q_conv, k_conv, v_conv, A_log, dt_bias = weights
    layout, context = layout_in_use(), state.conv
    if layout:
        u, z, beta, segment_ids = (layout.split(x) for x in (u, z, beta, segment_ids))
        context = layout.each(context)
    context_ids = jnp.broadcast_to(segment_ids[:, :1], (u.shape[0], q_conv.shape[0] - 1))
    if layout:
        context, context_ids = halo((u, segment_ids), (context, context_ids), layout)
    conv = lambda i, w: short_conv(u[:, :, i], w, segment_ids, context[:, :, i], context_ids)  # noqa: E731
    q, k, v = l2_norm(conv(0, q_conv)), l2_norm(conv(1, k_conv)), conv(2, v_conv)

    def attend(q, k, v, z, beta, S, segment_ids):
        options = {"gate_lower_bound": lower_bound, "initial_state": S, "segment_ids": segment_ids}
        return kda_from_raw_gate(q, k, v, z, beta, A_log, dt_bias, **options)

    conv_after = conv_context(u, segment_ids, context)
    if layout:
        o, S = context_kda(attend, q, k, v, z, beta, state.S, segment_ids, layout)
        o, conv_after = layout.join(o), of_last_live(conv_after, segment_ids, layout)
    elif u.shape[1] == 1:
        gate = kda_gate(z, A_log, dt_bias, lower_bound)
        o, S = recurrent_kda(q, k, v, gate, beta, initial_state=state.S, segment_ids=segment_ids)
    else:
        o, S = attend(q, k, v, z, beta, state.S, segment_ids)
    return o, KDAState(S, conv_after)


def _conv_init(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Uniform in +-1/sqrt(W), the usual start of a depthwise convolution of W taps."""
    bound = shape[0] ** -0.5
    return uniform(key, shape, -bound, bound).astype(dtype)


def _dt_bias_init(key: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """Inverse softplus of dt, log-uniform in [1e-3, 0.1]."""
    dt = jnp.exp(uniform(key, shape, math.log(1e-3), math.log(0.1))).astype(dtype)
    return dt + jnp.log(-jnp.expm1(-dt))
