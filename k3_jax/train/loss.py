"""Next-token cross entropy in float32, in chunks of the sequence: logits of a whole row never exist at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3_jax import sharding
from k3_jax.nn.transformer import K3
from k3_jax.parallel.fragments import layout_in_use


def next_token_loss(
    model: K3,
    h: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    chunk: int,
    z_loss: float,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum over targets of -log p(tokens[t + 1]) in nats where `loss_mask[t]`, and their number. Rows are arranged.

    Each target also costs `z_loss` (log sum exp)^2, which keeps logits small (PaLM, arXiv 2204.02311, §5).
    """
    B, T = tokens.shape
    tokens, loss_mask = (sharding.place(x, sharding.active("BT")) for x in (tokens, loss_mask))
    R = sharding.size_of("T")  # each rank cuts its own positions
    size = min(chunk, T // R)
    count = -(-(T // R) // size)
    targets = sharding.local(_targets, ("BT",), "BT")(tokens)

    def cut(x):
        rest, letters = x.shape[2:], "BT__"[: x.ndim + 1]
        x = sharding.reshape(x, (B, R, T // R, *rest), letters)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, count * size - T // R)] + [(0, 0)] * len(rest))
        return jnp.moveaxis(x.reshape(B, R, count, size, *rest), 2, 0)

    @jax.checkpoint
    def step(total, x):
        h, target, mask = (sharding.reshape(y, (B, R * size, *y.shape[3:]), "BTD"[: y.ndim - 1]) for y in x)
        logits = model.logits(h)
        peak = jax.lax.stop_gradient(logits.max(-1))
        log_sum = jnp.log(jnp.exp(logits - peak[..., None]).sum(-1)) + peak
        # A masked sum instead of a gather: the vocabulary may be sharded.
        hit = jnp.arange(logits.shape[-1])[None, None] == target[..., None]
        picked = jnp.where(hit, logits, 0.0).sum(-1)
        return total + jnp.where(mask, log_sum - picked + z_loss * log_sum**2, 0.0).sum(), None

    total, _ = jax.lax.scan(step, jnp.zeros((), jnp.float32), (cut(h), cut(targets), cut(loss_mask)))
    return total, loss_mask.sum()


def _targets(tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The token after each; 0 after the last."""
    layout = layout_in_use()
    if layout is None:
        return jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], axis=1)
    fragments = layout.split(tokens)
    return layout.join(jnp.concatenate([fragments[:, 1:], layout.shift(fragments[:, :1], -1)], axis=1))
