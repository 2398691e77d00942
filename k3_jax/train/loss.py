"""Next-token cross entropy in float32, in chunks of the sequence: logits of a whole row never exist at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3_jax.nn.transformer import K3


def next_token_loss(
    model: K3,
    h: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    chunk: int,
    z_loss: float,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum over targets of -log p(tokens[t + 1]) in nats where `loss_mask[t]`, and their number.

    Each target also costs `z_loss` (log sum exp)^2, which keeps logits small (PaLM, arXiv 2204.02311, §5).
    """
    B, T, D = h.shape
    size = min(chunk, T)
    count = -(-T // size)
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))

    def cut(x):
        x = jnp.pad(x, [(0, 0), (0, count * size - T)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, count, size, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(total, x):
        h, target, mask = x
        logits = model.logits(h)
        peak = jax.lax.stop_gradient(logits.max(-1))
        log_sum = jnp.log(jnp.exp(logits - peak[..., None]).sum(-1)) + peak
        # A masked sum instead of a gather: the vocabulary may be sharded.
        hit = jnp.arange(logits.shape[-1])[None, None] == target[..., None]
        picked = jnp.where(hit, logits, 0.0).sum(-1)
        return total + jnp.where(mask, log_sum - picked + z_loss * log_sum**2, 0.0).sum(), None

    total, _ = jax.lax.scan(step, jnp.zeros((), jnp.float32), (cut(h), cut(targets), cut(loss_mask)))
    return total, loss_mask.sum()
