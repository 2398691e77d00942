"""The K3 text model, slow and obvious: float64 NumPy, one document, one token after the other.

Written from the specification in its own letters and shares no code with the project. Tensors have canonical names.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean() + eps) * weight


def situ(g, u, beta, linear_beta):
    return beta * np.tanh(g / beta) * sigmoid(g) * linear_beta * np.tanh(u / linear_beta)


def gate(z, A_log, dt_bias, lower_bound):
    """Log-decay [H, K]; one rate per head (spec 2.2, 6)."""
    rate = np.exp(A_log)[:, None]
    if lower_bound is None:
        return -rate * np.logaddexp(0, z + dt_bias)
    return lower_bound * sigmoid(rate * (z + dt_bias))


class KDALayer:
    def __init__(self, w, config):
        self.w, self.config = w, config
        H, K, W = config.kda.num_heads, config.kda.head_dim, config.kda.conv_width
        self.S = np.zeros((H, K, K))
        self.past = {name: [np.zeros((H, K))] * W for name in "qkv"}

    def conv(self, name, u):
        self.past[name] = [*self.past[name][1:], u]
        taps = self.w[f"kda.{name}_conv"]
        return silu(sum(taps[j] * self.past[name][j] for j in range(len(taps))))

    def step(self, x):
        w, H, K = self.w, *self.S.shape[:2]
        q, k, v = (self.conv(n, np.einsum("d,dhk->hk", x, w[f"kda.{n}"])) for n in "qkv")
        z = np.einsum("r,rhk->hk", x @ w["kda.f_a"], w["kda.f_b"])
        g = gate(z, w["kda.A_log"], w["kda.dt_bias"], self.config.kda.gate_lower_bound)
        beta = sigmoid(x @ w["kda.b"])
        out_gate = sigmoid(np.einsum("d,dhk->hk", x, w["kda.g"]))
        y = np.zeros((H, K))
        for h in range(H):
            q_h = q[h] / np.sqrt((q[h] ** 2).sum() + 1e-6) * K**-0.5
            k_h = k[h] / np.sqrt((k[h] ** 2).sum() + 1e-6)
            S = np.exp(g[h])[:, None] * self.S[h]
            S = S + beta[h] * np.outer(k_h, v[h] - S.T @ k_h)
            self.S[h] = S
            y[h] = rms(S.T @ q_h, w["kda.o_norm"], self.config.norm_eps) * out_gate[h]
        return np.einsum("hk,hkd->d", y, w["kda.o"])


class MLALayer:
    def __init__(self, w, config):
        self.w, self.config, self.keys, self.values = w, config, [], []

    def step(self, x):
        w, c = self.w, self.config.mla
        N, C, H = c.qk_nope_head_dim, c.kv_lora_rank, c.num_heads
        q = np.einsum("q,qhk->hk", rms(x @ w["mla.q_a"], w["mla.q_a_norm"], c.latent_norm_eps), w["mla.q_b"])
        a = x @ w["mla.kv_a"]
        latent, k_pe = rms(a[:C], w["mla.kv_a_norm"], c.latent_norm_eps), a[C:]
        kv = np.einsum("c,chn->hn", latent, w["mla.kv_b"])
        self.keys.append(np.concatenate([kv[:, :N], np.tile(k_pe, (H, 1))], axis=1))
        self.values.append(kv[:, N:])
        out_gate = sigmoid(np.einsum("d,dhv->hv", x, w["mla.g"]))
        y = np.zeros((H, c.v_head_dim))
        for h in range(H):
            p = softmax(np.array([q[h] @ k[h] for k in self.keys]) * (N + c.qk_rope_head_dim) ** -0.5)
            y[h] = sum(p_s * v[h] for p_s, v in zip(p, self.values, strict=True)) * out_gate[h]
        return np.einsum("hv,hvd->d", y, w["mla.o"])


def glu(x, w, prefix, config, names=("gate", "up", "down")):
    gate_w, up_w, down_w = (w[f"{prefix}{name}"] for name in names)
    return situ(x @ gate_w, x @ up_w, config.situ_beta, config.situ_linear_beta) @ down_w


def route(x, w, config):
    """(experts in no particular order, weights, margin between the last one chosen and the first one not)."""
    scores = sigmoid(x @ w["moe.router"])
    biased = scores + w["moe.router_bias"]
    order = np.argsort(-biased)
    chosen = order[: config.moe.top_k]
    p = scores[chosen]
    if config.moe.renormalize:
        p = p / (p.sum() + 1e-20)
    margin = biased[order[config.moe.top_k - 1]] - biased[order[config.moe.top_k]]
    return chosen, p * config.moe.routed_scaling_factor, margin


def moe(x, w, config, margins):
    chosen, p, margin = route(x, w, config)
    margins.append(margin)
    z = x @ w["moe.latent_down"]
    u = np.zeros_like(z)
    for j, p_j in zip(chosen, p, strict=True):
        expert = {name: w[f"moe.{name}"][j] for name in ("w1", "w3", "w2")}
        u = u + p_j * glu(z, expert, "", config, ("w1", "w3", "w2"))
    return rms(u, w["moe.latent_norm"], config.norm_eps) @ w["moe.latent_up"] + glu(x, w, "moe.shared.", config)


def mix(sources, norm, query, eps):
    """Softmax over depth of the normalised sources' scores, applied to the raw sources (spec 4.2)."""
    s = np.array([(rms(v, norm, eps) * query).sum() for v in sources])
    return sum(p_j * v for p_j, v in zip(softmax(s), sources, strict=True))


class Oracle:
    """`Oracle(weights, config).run(tokens)`: logits [T, V]. `sums` [L, T, D] holds the running sum after each layer,
    `margins` the router's margins and `sources` the number of AttnRes sources per site in reading order."""

    def __init__(self, weights, config):
        self.config = config
        self.top = {name: np.asarray(x, np.float64) for name, x in weights.items() if not name.startswith("layers.")}
        self.layers = [self._layer(weights, f"layers.{i}.") for i in range(config.num_layers)]
        self.reset()

    @staticmethod
    def _layer(weights, prefix):
        mine = {name: x for name, x in weights.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): np.asarray(x, np.float64) for name, x in mine.items()}

    def reset(self):
        """A new document."""
        mixers = {True: MLALayer, False: KDALayer}
        self.mixers = [mixers[i in self.config.mla_layers](w, self.config) for i, w in enumerate(self.layers)]

    def run(self, tokens, segment_ids=None):
        self.margins, sums, logits = [], [], []
        segment_ids = [0] * len(tokens) if segment_ids is None else segment_ids
        previous = None
        for token, segment in zip(tokens, segment_ids, strict=True):
            if segment < 0:  # padding
                logits.append(np.zeros(self.config.vocab_size))
                sums.append(np.zeros((self.config.num_layers, self.config.hidden_size)))
                continue
            if previous is not None and segment != previous:
                self.reset()
            previous = segment
            y, r = self.token(token)
            logits.append(y)
            sums.append(r)
        self.sums = np.stack(sums, axis=1)
        return np.stack(logits)

    def token(self, token):
        config, eps = self.config, self.config.norm_eps
        E, r, after, self.sources = [], self.top["embed"][token], [], []
        for L, w in enumerate(self.layers):
            h = mix([*E, r], w["attn_res.norm"], w["attn_res.query"], eps) if E else r
            self.sources.append(len(E) + 1 if E else 0)
            if L % config.attn_res_block == 0:
                E, r = [*E, r], None
            a = self.mixers[L].step(rms(h, w["attn_norm"], eps))
            r = a if r is None else r + a
            h = mix([*E, r], w["ffn_res.norm"], w["ffn_res.query"], eps)
            self.sources.append(len(E) + 1)
            x = rms(h, w["ffn_norm"], eps)
            dense = L < config.first_dense_layers
            r = r + (glu(x, w, "dense.", config) if dense else moe(x, w, config, self.margins))
            after.append(r)
        h = mix([*E, r], self.top["output_attn_res.norm"], self.top["output_attn_res.query"], eps)
        self.sources.append(len(E) + 1)
        return rms(h, self.top["norm"], eps) @ self.top["lm_head"], np.stack(after)


def expected_logits(oracle, tokens, segment_ids):
    """[B, T, V], row by row; zeros at padding. No router's choice may hang on a rounding error of the other side."""
    rows = []
    for row, ids in zip(np.asarray(tokens), np.asarray(segment_ids), strict=True):
        oracle.reset()
        rows.append(oracle.run(row, ids))
        assert min(oracle.margins, default=1) > 1e-5, "near-tied experts: choose another seed"
    return np.stack(rows)


def assert_logits(actual, expected, segment_ids, tolerance=1e-4):
    """Largest difference at live positions; logits are of order 1. Padding must give finite numbers."""
    actual, live = np.asarray(actual), np.asarray(segment_ids) >= 0
    error = np.abs(actual - expected)[live].max()
    assert error <= tolerance, f"logits differ by {error:.1e}"
    assert np.isfinite(actual).all()
