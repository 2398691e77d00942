"""The Kimi K3 text model: embedding, the layers, the last AttnRes read-out, final norm and head."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from k3_jax import sharding
from k3_jax.config import ConfigError, K3Config
from k3_jax.nn import kda, mla
from k3_jax.nn.activations import Policy
from k3_jax.nn.attn_res import AttnRes, empty_summary, merge, mix
from k3_jax.nn.block import Block, Kind
from k3_jax.nn.depth import run_layers, run_layers_cached
from k3_jax.nn.embedding import embed
from k3_jax.nn.grouping import Depth
from k3_jax.nn.init import normal, ones
from k3_jax.nn.linear import param
from k3_jax.nn.norm import rms_norm
from k3_jax.parallel.fragments import arranged, whole
from k3_jax.sharding import precision


@partial(jax.tree_util.register_dataclass, data_fields=["layers", "lengths"], meta_fields=[])
@dataclass(frozen=True)
class Cache:
    """All that decoding carries: per group and run a KDAState or MLACache stacked [repeat, count, B, ...]."""

    layers: list[list]
    lengths: Int[Array, " B"]  # tokens so far in each row


class K3(nnx.Module):
    """`K3(config, rngs=nnx.Rngs(0))`. A module is a plain pytree: jax.jit, jax.grad and optax take it as it is."""

    def __init__(self, config: K3Config, *, rngs: nnx.Rngs, dtype=jnp.float32, interleave: int = 1):
        """`interleave`: chunks of layers on each rank of the mesh's `pipe` axis."""
        init, V, D = normal(config.init_std), config.vocab_size, config.hidden_size
        self.config = config
        self.depth = Depth(config, sharding.pipe_size(), interleave)
        self.embed = param(rngs, init, (V, D), "OL", dtype)  # see nn/embedding.py
        key, self.groups = rngs.params(), nnx.List([])
        for group, numbers in zip(self.depth.groups, self.depth.numbers, strict=True):
            stacks = [_stack(config, kind, n, key, dtype) for (kind, _), n in zip(group.runs, numbers, strict=True)]
            self.groups.append(nnx.List(stacks))
        self.output_attn_res = AttnRes(config, rngs=rngs, dtype=dtype)
        self.norm = param(rngs, ones, (D,), "_", dtype)
        self.lm_head = param(rngs, init, (D, V), "DO", dtype)

    @staticmethod
    def from_pretrained(directory: str | Path, dtype: DTypeLike | None = None) -> "K3":
        """The model of an Orbax checkpoint or of a directory in the released layout, on the mesh that is set."""
        from k3_jax.nn.pretrained import load_model  # it needs this class

        return load_model(directory, dtype)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> Float[Array, "B T O"]:
        """Logits in float32. `dtype` is that of the activations, and so of the matrix products."""
        segment_ids = jnp.zeros_like(tokens) if segment_ids is None else segment_ids
        h, _ = self.hidden(arranged(tokens), arranged(segment_ids), dtype)
        return whole(self.logits(h), "BSO")

    def hidden(
        self, tokens, segment_ids=None, dtype=jnp.bfloat16, policy: Policy = ()
    ) -> tuple[Float[Array, "B T D"], list]:
        """The final normed state, and each run's reports. Segments: a change resets, < 0 is padding. Rows are as
        `parallel.fragments.arranged` makes them. `policy`: what layers keep for their backward pass."""
        tokens = sharding.place(tokens, sharding.active("BT"))
        segment_ids = jnp.zeros_like(tokens) if segment_ids is None else segment_ids
        segment_ids = sharding.place(segment_ids, sharding.active("BT"))
        r = self.embedding(tokens, dtype)
        r, bank, reports = run_layers(self.depth, policy, *self._layers(), r, segment_ids)
        return self.read_out(r, bank), reports

    def read_out(self, r: Float[Array, "B T D"], bank: Float[Array, "N B T D"]) -> Float[Array, "B T D"]:
        """The final normed state, from the running sum after the last layer and the whole bank."""
        h, _ = mix(bank, bank.shape[0], r, self.output_attn_res.key(), self.config.norm_eps)
        return rms_norm(h, self.norm[...], self.config.norm_eps)

    def embedding(self, tokens: Int[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
        return embed(self.embed[...], tokens, dtype)

    def logits(self, h: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """float32 sums of products in h's dtype: rounding logits to bfloat16 would cost 0.02 nats per token."""
        head = sharding.use(self.lm_head[...], "DO", h.dtype, "BTO")
        return sharding.einsum(
            "btd,do->bto", h, head, out="BTO", precision=precision(h.dtype), preferred_element_type=jnp.float32
        )

    def extend(
        self, tokens: Int[Array, "B T"], valid: Int[Array, "B T"], cache: Cache, dtype: DTypeLike = jnp.bfloat16
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """T more positions per row: prefill of a chunk, or decode with T = 1. Returns the final normed states.

        `valid` is 0 at live positions and -1 at padding, which stands to the right and touches no cache.
        """
        config = self.config
        keys = self._site_keys()
        r = self.embedding(tokens, dtype)
        summary = empty_summary(2 * config.attn_res_block, r)
        r, summary, layers = run_layers_cached(
            self.depth, *self._layers(), r, valid, cache.lengths, cache.layers, keys, summary
        )
        last = jnp.asarray((2 * config.num_layers - 1) % (2 * config.attn_res_block))
        h = merge(summary, last, r, self.output_attn_res.key(), config.norm_eps)
        lengths = cache.lengths + jnp.sum(valid >= 0, axis=1)
        return rms_norm(h, self.norm[...], config.norm_eps), Cache(layers, lengths)

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike = jnp.bfloat16) -> Cache:
        """An empty cache for `batch` rows of at most `capacity` tokens; recurrent states are float32 whatever dtype."""

        def one(kind: Kind, shape: tuple[int, int]):
            make = mla.init_cache if kind.mla else kda.init_state
            args = (batch, capacity, dtype) if kind.mla else (batch, dtype)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), make(self.config, *args))

        layers = [[one(kind, (group.repeat, count)) for kind, count in group.runs] for group in self.depth.groups]
        return Cache(layers, sharding.place(jnp.zeros(batch, jnp.int32), sharding.active("B")))

    def _layers(self) -> tuple[list[list[Block]], list[list[np.ndarray]]]:
        """The stacks, and the layers' numbers. Raises ConfigError on a pipeline, whose ranks hold chunks of them."""
        if self.depth.lead:
            raise ConfigError("mesh.pipe > 1: a model in chunks is trained and evaluated, not called")
        return [list(runs) for runs in self.groups], self.depth.numbers

    def _site_keys(self) -> Float[Array, "sites D"]:
        """The AttnRes sites in reading order (attention, FFN of each layer, read-out), padded to whole blocks."""
        config = self.config
        total = 2 * config.attn_res_block * config.num_attn_res_blocks + 1
        keys = jnp.zeros((total, config.hidden_size), jnp.float32)
        for numbers, runs in zip(self.depth.numbers, self.groups, strict=True):
            for layers, block in zip(numbers, runs, strict=True):
                layers = layers.reshape(-1)
                for site, key in ((0, block.attn_res.key()), (1, block.ffn_res.key())):
                    keys = keys.at[2 * layers + site].set(key.reshape(-1, config.hidden_size))
        return keys.at[2 * config.num_layers].set(self.output_attn_res.key())


def _stack(config: K3Config, kind: Kind, numbers: np.ndarray, key: jax.Array, dtype) -> Block:
    """The layers of these numbers; a layer's first weights do not depend on how layers are stacked."""

    def make(number):
        if number.ndim:
            return jax.vmap(make)(number)
        return Block(config, kind, rngs=nnx.Rngs(jax.random.fold_in(key, number)), dtype=dtype)

    spec = PartitionSpec("pipe") if numbers.ndim > 2 else PartitionSpec()
    return jax.jit(make)(sharding.place(jnp.asarray(numbers), spec))
