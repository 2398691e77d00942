"""Parameters, projections and SiTU-GLU.

Weights are cast to the dtype of the activations where they are used: the dtype of a run is that of the embedding.
Products of float32 operands ask for highest precision, since a TPU's default is a single bf16 pass.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3_jax import sharding
from k3_jax.config import K3Config
from k3_jax.nn.activations import named
from k3_jax.nn.init import Init, normal
from k3_jax.sharding import precision


def param(rngs: nnx.Rngs, init: Init, shape: tuple[int, ...], letters: str, dtype=jnp.float32) -> nnx.Param:
    """A parameter stored by its sharding letters, one letter per axis ('_': not sharded)."""
    return nnx.Param(sharding.place(init(rngs.params(), shape, dtype), sharding.stored(letters)))


def project(subscripts: str, x: Array, weight: nnx.Param | Array, letters: str, out: str) -> Array:
    """`einsum(subscripts, x, weight)` in x's dtype with float32 accumulation. `letters` name the weight's axes."""
    used = sharding.use(weight[...], letters, x.dtype, out)
    return sharding.einsum(subscripts, x, used, out=out, precision=precision(x.dtype))


def situ(gate: Float[Array, "*r F"], up: Float[Array, "*r F"], beta: float, linear_beta: float) -> Array:
    """SiTU-GLU, bounded by beta * linear_beta; float32 inside, the input's dtype outside (report Eq. 12)."""
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    activated = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * linear_beta * jnp.tanh(u / linear_beta)
    return activated.astype(gate.dtype)


class MLP(nnx.Module):
    """down(SiTU(gate(x), up(x))): the dense FFN of layer 0, and the shared experts."""

    def __init__(self, config: K3Config, inner: int, *, rngs: nnx.Rngs, dtype=jnp.float32):
        init, D = normal(config.init_std), config.hidden_size
        self.config = config
        self.gate = param(rngs, init, (D, inner), "DF", dtype)
        self.up = param(rngs, init, (D, inner), "DF", dtype)
        self.down = param(rngs, init, (inner, D), "FD", dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = project("btd,df->btf", x, self.gate, "DF", "BTF")
        up = project("btd,df->btf", x, self.up, "DF", "BTF")
        hidden = named("ffn_hidden", situ(gate, up, self.config.situ_beta, self.config.situ_linear_beta))
        return project("btf,fd->btd", hidden, self.down, "FD", "BTD")
