"""Stable LatentMoE (report §2.3): a float32 sigmoid router, experts in a latent space, a norm before the way up.

E experts, k experts per token, L latent width, F expert width, D model width.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3_jax import sharding
from k3_jax.config import K3Config, MoEConfig
from k3_jax.nn.activations import named
from k3_jax.nn.balance import expert_load, histogram
from k3_jax.nn.init import normal, ones, zeros
from k3_jax.nn.linear import MLP, param, project, situ
from k3_jax.nn.norm import rms_norm
from k3_jax.parallel.expert import in_order, routed_experts


@partial(jax.tree_util.register_dataclass, data_fields=["histogram", "load"], meta_fields=[])
@dataclass(frozen=True)
class RouterStats:
    """Integer counts over the live tokens of a batch; they add up over micro-batches and devices."""

    histogram: Int[Array, "*s E bins"]  # required biases, for Quantile Balancing
    load: Int[Array, "*s E"]  # tokens routed to each expert


class LatentMoE(nnx.Module):
    def __init__(self, config: K3Config, *, rngs: nnx.Rngs, dtype=jnp.float32):
        init, D, moe = normal(config.init_std), config.hidden_size, config.moe
        E, L, F = moe.num_experts, moe.latent_dim, moe.expert_dim
        self.config = config
        self.router = param(rngs, init, (D, E), "D_", dtype)
        self.router_bias = param(rngs, zeros, (E,), "_")
        self.latent_down = param(rngs, init, (D, L), "D_", dtype)
        self.latent_norm = param(rngs, ones, (L,), "_", dtype)
        self.latent_up = param(rngs, init, (L, D), "_D", dtype)
        self.w1 = param(rngs, init, (E, L, F), "ELF", dtype)
        self.w3 = param(rngs, init, (E, L, F), "ELF", dtype)
        self.w2 = param(rngs, init, (E, F, L), "EFL", dtype)
        self.shared = MLP(config, moe.shared_dim, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], RouterStats]:
        """up(rms(sum_j p_j E_j(down x))) + shared(x). Padding (ids < 0) is left out of the counts."""
        p, chosen, stats = self.route(x, segment_ids)
        z = named("moe_latent", project("btd,dl->btl", x, self.latent_down, "D_", "BT_"))
        # First, or XLA gathers the shared experts' weights between two chunks of the routed experts' rows.
        z, shared = in_order(z, self.shared(x))
        weights = tuple(
            sharding.place(w[...].astype(x.dtype), sharding.active(letters))
            for w, letters in ((self.w1, "ELF"), (self.w3, "ELF"), (self.w2, "EFL"))
        )
        experts = sharding.local(
            partial(experts_of, config=self.config), ("BT_", "BT_", "BT_", ("ELF", "ELF", "EFL")), "BT_"
        )
        u = named("moe_output", experts(z, p, chosen, weights).astype(x.dtype))
        u = rms_norm(u, self.latent_norm[...], self.config.norm_eps)
        return project("btl,ld->btd", u, self.latent_up, "_D", "BTD") + shared, stats

    def route(self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"]):
        """Combine weights p [B, T, k] (float32), chosen experts [B, T, k] and the counts of this batch."""
        router = sharding.use(self.router[...], "D_", jnp.float32, "BT_")
        logits = sharding.einsum(
            "btd,de->bte", x.astype(jnp.float32), router, out="BT_", precision=jax.lax.Precision.HIGHEST
        )
        choose = sharding.local(partial(_choose, moe=self.config.moe), ("BT_", "_", "BT"), ("BT_", "BT_", ("__", "_")))
        p, chosen, (counts, load) = choose(jax.nn.sigmoid(logits), self.router_bias[...], segment_ids)
        return p, chosen, RouterStats(counts, load)


def _choose(scores, bias, segment_ids, *, moe: MoEConfig):
    """The bias decides who is chosen and never enters the weights (report Eq. 13). Padding, whose tokens are alike,
    goes to all experts in turn with weight 0: it must not make experts busy."""
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores + bias[None, None]), moe.top_k)
    padding = (segment_ids < 0)[..., None]
    chosen = jnp.where(padding, jnp.arange(chosen.size).reshape(chosen.shape) % moe.num_experts, chosen)
    picked = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.renormalize:
        picked = picked / (picked.sum(-1, keepdims=True) + 1e-20)
    picked = jnp.where(padding, 0.0, picked)
    live = (segment_ids >= 0).reshape(-1)
    counts = histogram(scores.reshape(-1, moe.num_experts), bias, moe.top_k, moe.quantile_bins, live)
    load = expert_load(chosen.reshape(-1, moe.top_k), moe.num_experts, live)
    counts, load = sharding.sum_over("BT", counts), sharding.sum_over("BT", load)
    return picked * moe.routed_scaling_factor, chosen, (counts, load)


def experts_of(
    z: Float[Array, "B T L"], p: Float[Array, "B T k"], chosen: Int[Array, "B T k"], weights, *, config: K3Config
) -> Float[Array, "B T L"]:
    """sum_j p_j w2_j SiTU(w1_j z, w3_j z) of one device's tokens, in float32."""
    tokens = (x.reshape(-1, x.shape[-1]) for x in (z, p, chosen))
    activation = partial(situ, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
    u = routed_experts(*tokens, *weights, activation=activation, axis=sharding.axis_of("E"))
    return sharding.sum_over("F", u.reshape(*z.shape[:2], -1))
