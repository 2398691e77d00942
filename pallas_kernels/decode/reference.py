"""One decode step in plain JAX, layer by layer, with the kernel's rounding points written out.

Everything is float32 but for these, which are rounded to `dtype` (bfloat16 in the kernel; float32 rounds nothing, and
the step then equals the model's own decoding):

    x            the normed input of a mixer, of channels, of the head
    u            KDA's q, k, v before their convolutions, which are also what the convolutions remember
    f            the low-rank half of KDA's decay gate
    o            the gated output of a mixer, before its last projection
    q, c         MLA's normed query and latent (the extra key with it: that is what is cached), queries, absorbed ones
    p, ctx       MLA's exp(score - peak), and its attention over latents
    a_n          a rank's part of a mixer's output, of the dense layers', and of the routed experts' sum: N parts are
                 then added in float32, in the order of the ranks
    z, hidden    latents, and all hidden layers after SiTU
    u'           the normed sum of the experts
    y            shared experts' output, routed experts' output, embedding

Weights are float32 arrays of values that `dtype` can represent. Routers' logits are exact products summed in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.decode.config import DecodeConfig
from pallas_kernels.decode.slots import CHAINED, Slots

Weights = Mapping[str, Array]
_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@partial(jax.tree_util.register_dataclass, data_fields=["S", "conv", "latent"], meta_fields=[])
@dataclass(frozen=True)
class Caches:
    """Stacked over the layers of a kind, P slots. `conv` holds the last W - 1 inputs, newest last."""

    S: Float[Array, "layers P H K V"]
    conv: Float[Array, "layers P W1 three H K"]
    latent: Float[Array, "layers P S CR"]


def empty_caches(config: DecodeConfig) -> Caches:
    P, kda, s = config.cache_slots, config.kda, config.mla
    H, K, W = kda.heads, kda.head_dim, kda.conv_width
    n_kda, n_mla = len(config.kda_layers), len(config.mla_layers)
    return Caches(
        jnp.zeros((n_kda, P, H, K, K)),
        jnp.zeros((n_kda, P, W - 1, 3, H, K)),
        jnp.zeros((n_mla, P, config.capacity, s.kv_rank + s.pe)),
    )


def step(
    weights: Weights,
    caches: Caches,
    token: Int[Array, " B"],
    position: Int[Array, " B"],
    slots: Slots,
    *,
    config: DecodeConfig,
    dtype: DTypeLike = jnp.bfloat16,
) -> tuple[Float[Array, "B vocab"], Caches]:
    """Logits after `token`, which stands at `position` (0-based; negative: the row is idle and changes nothing) of the
    sequence in `slots`. A row with entry CHAINED goes on from the state after the row before it.

    `weights` by canonical name; the experts' w1, w3, w2 as values.
    """
    run = _Step(weights, config, lambda x: x.astype(dtype).astype(jnp.float32), position, slots)
    r = run.round(weights["embed"][token])
    bank = []
    for layer, kind in enumerate(config.layers):
        w = _Layer(weights, layer)
        h = run.mix(bank, r, w("attn_res.norm") * w("attn_res.query")) if bank else r
        first = layer % config.attn_res_block == 0
        if first:
            bank.append(r)
        x = run.norm(h, w("attn_norm"))
        a, caches = (run.mla if kind.mla else run.kda)(w, x, caches, layer)
        r = a if first else r + a
        x = run.norm(run.mix(bank, r, w("ffn_res.norm") * w("ffn_res.query")), w("ffn_norm"))
        r = r + (run.moe if kind.moe else run.dense)(w, x)
    h = run.mix(bank, r, weights["output_attn_res.norm"] * weights["output_attn_res.query"])
    return _einsum("bd,dv->bv", run.norm(h, weights["norm"]), weights["lm_head"]), caches


@dataclass(frozen=True)
class _Layer:
    weights: Weights
    layer: int

    def __call__(self, name: str) -> Array:
        return self.weights[f"layers.{self.layer}.{name}"]


@dataclass(frozen=True)
class _Step:
    weights: Weights
    config: DecodeConfig
    round: object
    position: Int[Array, " B"]
    slots: Slots

    def norm(self, x, weight):
        return self.round(rms(x, self.config.norm_eps, self.config.own.hidden) * weight[None])

    def mix(self, bank: list, r, key):
        """Softmax over the bank's rows and r (report Eqs. 8-9)."""
        v = jnp.stack([*bank, r])
        s = _einsum("nbd,d->nb", v, key) * jax.lax.rsqrt(
            jnp.sum(v * v, axis=-1) / self.config.own.hidden + self.config.norm_eps
        )
        return _einsum("nb,nbd->bd", jax.nn.softmax(s, axis=0), v)

    def summed(self, o, weight):
        """o W over the channels of each rank, rounded, then over the ranks."""
        N = self.config.ranks
        parts = _einsum("bnk,nkd->nbd", o.reshape(len(o), N, -1), weight.reshape(N, -1, weight.shape[-1]))
        return self.round(parts).sum(0)

    def kda(self, w: _Layer, x, caches: Caches, layer: int):
        i, c = self.config.kda_layers.index(layer), self.config.kda
        u = self.round(jnp.stack([_einsum("bd,dhk->bhk", x, w(f"kda.{name}")) for name in "qkv"], axis=1))
        taps = jnp.stack([w(f"kda.{name}_conv") for name in "qkv"], axis=1)
        f = self.round(_einsum("bd,dr->br", x, w("kda.f_a")))
        z = _einsum("br,rhk->bhk", f, w("kda.f_b")) + w("kda.dt_bias")[None]
        g = decay(z, jnp.exp(w("kda.A_log"))[None, :, None], c.gate_lower_bound)
        beta = jax.nn.sigmoid(_einsum("bd,dh->bh", x, w("kda.b")))
        before, after, state, o = (caches.S[i], caches.conv[i]), [caches.S[i], caches.conv[i]], None, []
        for b, (entry, exit) in enumerate(zip(self.slots.entry, self.slots.exit, strict=True)):
            start = [x[entry] for x in before]
            if b:
                start = [jnp.where(entry == CHAINED, *x) for x in zip(state, start, strict=True)]
            end, row = self.recur(*start, u[b], taps, g[b], beta[b])
            state = [jnp.where(self.position[b] >= 0, *x) for x in zip(end, start, strict=True)]
            left = [jnp.where(self.position[b] >= 0, x, slots[exit]) for x, slots in zip(state, after, strict=True)]
            after = [slots.at[exit].set(x) for x, slots in zip(left, after, strict=True)]
            o.append(row)
        o = jnp.stack(o)
        gate = jax.nn.sigmoid(_einsum("bd,dhk->bhk", x, w("kda.g")))
        o = self.round(rms(o, self.config.norm_eps, self.config.own.head_dim) * w("kda.o_norm")[None, None] * gate)
        caches = replace(caches, S=caches.S.at[i].set(after[0]), conv=caches.conv.at[i].set(after[1]))
        return self.summed(o.reshape(len(x), -1), w("kda.o").reshape(-1, x.shape[1])), caches

    def recur(self, S, past, u, taps, g, beta):
        """One token of one row: ((S, past) after it, output [H, V])."""
        history = jnp.concatenate([past, u[None]], axis=0)
        q, k, v = jax.nn.silu(_einsum("wchk,wchk->chk", history, taps))
        q, k = (a * jax.lax.rsqrt(jnp.sum(a * a, -1, keepdims=True) + 1e-6) for a in (q, k))
        S = jnp.exp(g)[..., None] * S
        error = v - _einsum("hkv,hk->hv", S, k)
        S = S + k[..., None] * (beta[..., None] * error)[..., None, :]
        return (S, history[1:]), _einsum("hkv,hk->hv", S, q * self.config.own.head_dim**-0.5)

    def mla(self, w: _Layer, x, caches: Caches, layer: int):
        i, c = self.config.mla_layers.index(layer), self.config.mla
        q = rms(_einsum("bd,dq->bq", x, w("mla.q_a")), c.norm_eps, self.config.own.q_rank)
        q = self.round(q * w("mla.q_a_norm")[None])
        kv = _einsum("bd,dc->bc", x, w("mla.kv_a"))
        latent = rms(kv[:, : c.kv_rank], c.norm_eps, self.config.own.kv_rank)
        latent = self.round(latent * w("mla.kv_a_norm")[None])
        latent = jnp.concatenate([latent, self.round(kv[:, c.kv_rank :])], axis=1)
        q = self.round(_einsum("bq,qhn->bhn", q, w("mla.q_b")))
        absorbed = self.round(_einsum("bhn,chn->bhc", q[..., : c.nope], w("mla.kv_b")[..., : c.nope]))
        slots = caches.latent[i]
        positions = jnp.arange(slots.shape[1])[None]
        for b, slot in enumerate(self.slots.latent):
            here = (positions == self.position[b])[0, :, None]
            slots = slots.at[slot].set(jnp.where(here, latent[b][None], slots[slot]))
        cache = slots[self.slots.latent]
        s = (
            _einsum("bhc,bsc->bhs", jnp.concatenate([absorbed, q[..., c.nope :]], axis=-1), cache)
            * self.config.own.query**-0.5
        )
        s = jnp.where((positions <= self.position[:, None])[:, None], s, -1e30)
        p = jnp.exp(s - s.max(-1, keepdims=True))
        ctx = _einsum("bhs,bsc->bhc", self.round(p), cache[..., : c.kv_rank]) / p.sum(-1, keepdims=True)
        o = _einsum("bhc,chv->bhv", self.round(ctx), w("mla.kv_b")[..., c.nope :])
        o = self.round(o * jax.nn.sigmoid(_einsum("bd,dhv->bhv", x, w("mla.g"))))
        caches = replace(caches, latent=caches.latent.at[i].set(slots))
        return self.summed(o.reshape(len(x), -1), w("mla.o").reshape(-1, x.shape[1])), caches

    def situ(self, gate, up):
        return situ(gate, up, self.config.situ_beta, self.config.situ_linear_beta)

    def dense(self, w: _Layer, x):
        hidden = self.situ(_einsum("bd,df->bf", x, w("dense.gate")), _einsum("bd,df->bf", x, w("dense.up")))
        return self.summed(self.round(hidden), w("dense.down"))

    def moe(self, w: _Layer, x):
        c = self.config.moe
        scores = jax.nn.sigmoid(_einsum("bd,de->be", x, w("moe.router")))
        _, chosen = jax.lax.top_k(scores + w("moe.router_bias")[None], c.top_k)
        p = jnp.take_along_axis(scores, chosen, axis=1)
        p = (p / (p.sum(1, keepdims=True) + 1e-20) if c.renormalize else p) * c.scale
        z = self.round(_einsum("bd,dl->bl", x, w("moe.latent_down")))
        gate, up = (_einsum("bl,bklf->bkf", z, w(f"moe.{name}")[chosen]) for name in ("w1", "w3"))
        hidden = self.round(self.situ(gate, up)).reshape(len(x), c.top_k, self.config.ranks, -1)
        w2 = w("moe.w2")[chosen].reshape(*hidden.shape, -1)
        u = self.round(_einsum("bk,bknf,bknfl->nbl", p, hidden, w2)).sum(0)
        u = rms(u, self.config.norm_eps, self.config.own.latent)
        u = self.round(u * w("moe.latent_norm")[None])
        shared = self.situ(*(_einsum("bd,df->bf", x, w(f"moe.shared.{name}")) for name in ("gate", "up")))
        shared = _einsum("bf,fd->bd", self.round(shared), w("moe.shared.down"))
        return self.round(_einsum("bl,ld->bd", u, w("moe.latent_up"))) + self.round(shared)


def rms(x: Float[Array, "*r D"], eps: float, width: int) -> Float[Array, "*r D"]:
    """RMS norm of `width` channels; others are zeros."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) / width + eps)


def decay(z: Float[Array, "*s"], rate: Float[Array, "*r"], bound: float | None) -> Float[Array, "*s"]:
    """KDA's log-decay (report Eq. 5; without a bound that of Kimi Linear)."""
    return -rate * jax.nn.softplus(z) if bound is None else bound * jax.nn.sigmoid(rate * z)


def situ(gate: Float[Array, "*s"], up: Float[Array, "*s"], beta: float, linear_beta: float) -> Float[Array, "*s"]:
    """SiTU-GLU (report Eq. 12)."""
    return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * linear_beta * jnp.tanh(up / linear_beta)
