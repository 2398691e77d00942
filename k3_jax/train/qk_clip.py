"""QK-clip (Kimi K2): heads whose attention logits grew too large get smaller query and key weights.

K3's report says "weight clipping as in K2" and gives no threshold; K2's is 100. Only MLA layers need it: KDA normalises
its queries and keys.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def _gamma(max_logits: Float[Array, "*L H"], threshold: float) -> Float[Array, "*L H"]:
    """threshold / S_max for heads above the threshold, exactly 1 for the others (and for NaN)."""
    above = max_logits > threshold
    return jnp.where(above, threshold / jnp.where(above, max_logits, 1.0), 1.0)


def _scale(weight: Float[Array, "*L I H J"], factors: Float[Array, "*L H J"]) -> Float[Array, "*L I H J"]:
    return (weight.astype(jnp.float32) * factors[..., None, :, :]).astype(weight.dtype)


def _beside(
    left: Float[Array, "*L H 1"], left_dim: int, right: Float[Array, "*L H 1"], right_dim: int
) -> Float[Array, "*L H J"]:
    return jnp.concatenate([jnp.repeat(left, left_dim, axis=-1), jnp.repeat(right, right_dim, axis=-1)], axis=-1)


def qk_clip(
    q_b: Float[Array, "*L Q H qk"],
    kv_b: Float[Array, "*L C H kv"],
    max_logits: Float[Array, "*L H"],
    *,
    threshold: float,
    nope_dim: int,
) -> tuple[Float[Array, "*L Q H qk"], Float[Array, "*L C H kv"]]:
    """(q_b, kv_b) whose largest logit of the step, `max_logits` (after the softmax scale), is at most `threshold`.

    The logit of a head is q_nope . k_nope + q_rope . k_rope, and all heads share k_rope, which must not change: so with
    gamma = threshold / S_max both nope parts take sqrt(gamma), and q's rope part takes gamma alone. Weights of heads
    under the threshold and all values stay bit-identical. Apply after the optimizer's update.
    """
    gamma = _gamma(max_logits, threshold)[..., None]
    root, one = jnp.sqrt(gamma), jnp.ones_like(gamma)
    return (
        _scale(q_b, _beside(root, nope_dim, gamma, q_b.shape[-1] - nope_dim)),
        _scale(kv_b, _beside(root, nope_dim, one, kv_b.shape[-1] - nope_dim)),
    )
