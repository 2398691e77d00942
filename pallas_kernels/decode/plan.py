"""All that a step does outside of its arithmetic, as data: exchanges between ranks, arrays in HBM, buffers in VMEM.

Kernel, packer, ledger, protocol check, benchmark and tests are made from one Plan.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode.config import LANES, DecodeConfig, DecodeConfigError, LayerKind, round_up
from pallas_kernels.decode.record import Record
from pallas_kernels.decode.tape import Tape

VECTORS = ("attn_norm", "ffn_norm", "latent_norm", "router_bias", "q_norm", "kv_norm")
VECTOR_ROWS = 8
HAND = 4  # experts whose products are made together: wide products keep the matrix unit busy
# Latents and the shared experts' hidden layer leave while `route` is on its way; they are awaited when the experts have
# been chosen, and while the experts' sum is on its way.
BESIDE = ("latents", "shared")
F32, I32 = jnp.float32, jnp.int32


@dataclass(frozen=True)
class Exchange:
    """One dependent remote exchange: every rank sends `shape` to every other one, the same to all, or with `to_each`
    something else to each. What rank n sent stands in place n of the receiver's buffer."""

    name: str
    shape: tuple[int, int]
    dtype: Any
    to_each: bool = False

    def sent(self, ranks: int) -> int:
        """Bytes that a rank puts on its links."""
        rows, lanes = self.shape
        return (ranks - 1) * rows * lanes * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Plan:
    config: DecodeConfig

    def __post_init__(self):
        banks, tiles = self.config.blocks.banks, self.tape.head.tiles
        if banks > tiles:
            expected = f"at most {tiles}, the tiles of the head: only there the tape ends"
            raise DecodeConfigError(f"blocks.banks = {banks}: expected {expected}")

    @cached_property
    def tape(self) -> Tape:
        return Tape(self.config)

    @cached_property
    def record(self) -> Record:
        return Record.of(self.config)

    @cached_property
    def hand(self) -> int:
        """Experts that are waited for, and multiplied, together; there are slots for this hand and the next."""
        k, most = self.config.moe.top_k, min(HAND, self.config.blocks.expert_slots // 2)
        return max(n for n in range(1, most + 1) if k % n == 0)

    # Exchanges

    @cached_property
    def exchanges(self) -> dict[str, Exchange]:
        """By name. Parts of sums travel in `dtype`, parts of vectors as float32."""
        c, share = self.config, self.config.share
        B, heads = c.rows, share(c.mla.heads)
        down = share(c.mla.q_rank) + share(c.mla.kv_rank + c.mla.pe)
        every = (
            Exchange("hidden", (B, c.columns(c.hidden)), F32),
            *self._sum("mixer_sum", c.hidden),
            *self._sum("dense_sum", c.hidden),
            Exchange("route", (B, c.columns(c.moe.experts)), F32),
            Exchange("latents", (B, c.columns(c.moe.latent)), F32),
            Exchange("shared", (B, c.columns(c.moe.shared)), F32),
            *self._sum("latent_sum", c.moe.latent),
            Exchange("mla_down", (B, round_up(down, LANES)), F32),
            Exchange("queries", (B * heads, c.key_width), c.dtype),
            Exchange("contexts", (B * heads, c.mla.kv_rank + LANES), F32, to_each=True),
            Exchange("token", (B, LANES), F32),
        )
        used = {*self.step_exchanges, *BESIDE}
        return {exchange.name: exchange for exchange in every if exchange.name in used}

    def _sum(self, name: str, width: int) -> tuple[Exchange, ...]:
        """Of a vector [B, width]: whole, in two halves of rows, or slices to everyone and then from everyone."""
        c, B = self.config, self.config.rows
        whole = Exchange(name, (2 * B, width // 2), c.dtype)
        if whole.sent(c.ranks) <= c.blocks.whole_sum_bytes:
            return (whole,)
        lanes = c.columns(width)
        return Exchange(f"{name}_slices", (B, lanes), c.dtype, to_each=True), Exchange(f"{name}_total", (B, lanes), F32)

    def sum_exchanges(self, name: str) -> tuple[str, ...]:
        """Of a sum's name."""
        width = self.config.moe.latent if name == "latent_sum" else self.config.hidden
        return tuple(exchange.name for exchange in self._sum(name, width))

    def mixer_exchanges(self, mla: bool) -> tuple[str, ...]:
        if not mla:
            return self.sum_exchanges("mixer_sum")
        inside = ("queries", "contexts") if self.config.cache_ranks > 1 else ()
        return ("mla_down", *inside, *self.sum_exchanges("mixer_sum"))

    def channel_exchanges(self, moe: bool) -> tuple[str, ...]:
        if not moe:
            return self.sum_exchanges("dense_sum")
        return ("route", *self.sum_exchanges("latent_sum"), "hidden")

    def layer_exchanges(self, kind: LayerKind) -> tuple[str, ...]:
        return self.mixer_exchanges(kind.mla) + self.channel_exchanges(kind.moe)

    @cached_property
    def step_exchanges(self) -> tuple[str, ...]:
        """The exchanges of a step that depend on each other, in their order: the embedding's, the layers', the chosen
        token's. Those `BESIDE` them are on their way meanwhile."""
        layers = (name for kind in self.config.layers for name in self.layer_exchanges(kind))
        return ("hidden", *layers, "token")

    # HBM

    @cached_property
    def weights(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Arrays of one rank. `vectors`: per layer rows in the order of VECTORS, and at last the final norm. `heads`:
        per head the taps of q, k, v, then dt_bias, exp(A_log), o_norm. `keys`: per AttnRes block the keys of the sites
        that read its bank, in order."""
        c = self.config
        D, h, K, W = c.hidden, c.share(c.kda.heads), c.kda.head_dim, c.kda.conv_width
        embed = round_up(c.share(D), 2 * LANES) // 2
        of = jax.ShapeDtypeStruct
        return {
            "tape": of(self.tape.shape, c.dtype),
            "experts": of((len(c.moe_layers), c.moe.experts, *self.record.shape), I32),
            "vectors": of((len(c.layers) + 1, VECTOR_ROWS, D), F32),
            "heads": of((len(c.kda_layers), h, round_up(3 * W + 3, 8), K), F32),
            "keys": of((c.attn_res_blocks, 2 * c.attn_res_block, D), F32),
            "embed": of((c.vocab, 2, embed), c.dtype),
        }

    @cached_property
    def caches(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Of one rank, for all slots. `S` and `conv` are those of `nn.kda.KDAState`, with heads before taps."""
        c = self.config
        P, h, K, W = c.cache_slots, c.share(c.kda.heads), c.kda.head_dim, c.kda.conv_width
        of = jax.ShapeDtypeStruct
        return {
            "S": of((len(c.kda_layers), P, h, K, K), F32),
            "conv": of((len(c.kda_layers), P, h, round_up(3 * (W - 1), 8), K), F32),
            "latent": of((len(c.mla_layers), P, c.cache_length, c.key_width), c.dtype),
        }

    @cached_property
    def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """`token` holds the greedy token of a row in all lanes; `logits` are this rank's columns."""
        c, of = self.config, jax.ShapeDtypeStruct
        return {"token": of((c.rows, LANES), I32), "logits": of((c.rows, c.share(c.vocab)), F32)}

    # SMEM

    @cached_property
    def layer_table(self) -> tuple[tuple[int, ...], ...]:
        """Per layer: is it MLA, is it MoE, its number among KDA, MLA and MoE layers, its tiles' starts."""
        c, rows, counts = self.config, [], {"kda": 0, "mla": 0, "moe": 0}
        for kind, starts in zip(c.layers, self.tape.starts, strict=True):
            rows.append((int(kind.mla), int(kind.moe), *counts.values(), *starts))
            counts["mla" if kind.mla else "kda"] += 1
            counts["moe"] += kind.moe
        return tuple(rows)

    # VMEM

    @cached_property
    def buffers(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Scratch in VMEM, beside the exchanges' buffers (`exchange_buffers`)."""
        c, b = self.config, self.config.blocks
        B, D, sites, of = c.rows, c.hidden, 2 * c.attn_res_block, jax.ShapeDtypeStruct
        weights, caches = self.weights, self.caches
        return {
            "banks": of((b.banks, b.tile_rows, b.tile_cols), c.dtype),
            "experts": of((b.expert_slots, *self.record.shape), I32),
            "vectors": of((2, *weights["vectors"].shape[1:]), F32),
            "heads": of((2, *weights["heads"].shape[1:]), F32),
            "keys": of((2, *weights["keys"].shape[1:]), F32),
            "embed": of((B, *weights["embed"].shape[1:]), c.dtype),
            "S": of((2, B, *caches["S"].shape[2:]), F32),
            "conv": of((2, B, *caches["conv"].shape[2:]), F32),
            "latent": of((2, b.cache_rows, c.key_width), c.dtype),
            "attended": of((B * c.query_heads, c.mla.kv_rank + LANES), F32),
            "residual": of((B, D), F32),
            "bank": of((B, c.attn_res_blocks, D), F32),
            "summary": of((sites, B, D), F32),
            "summary_scores": of((sites, B, 2 * LANES), F32),
            "routed": of((B, c.moe.latent), F32),
            "chosen": of((round_up(c.moe.top_k, 8), LANES), I32),
            "weights": of((round_up(c.moe.top_k, 8), LANES), F32),
        }

    @cached_property
    def exchange_buffers(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Where the other ranks' parts arrive; for `to_each` also what goes to each."""
        made = {}
        for name, exchange in self.exchanges.items():
            places = self.config.ranks * (1 + exchange.to_each)
            made[name] = jax.ShapeDtypeStruct((places, *exchange.shape), exchange.dtype)
        return made
