"""From a model's arrays to what one rank of the kernel holds, in NumPy: weights, and caches in both directions.

Weights come by canonical name as `reference.step` takes them, the routed experts as `ExpertCodes`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pallas_kernels.decode.config import LANES, DecodeConfig, round_up
from pallas_kernels.decode.plan import VECTORS, Plan
from pallas_kernels.decode.record import GROUP, OUTPUTS, PER_WORD, QUARTERS, SCALES, STRETCH, Record
from pallas_kernels.decode.tape import Block, Part

Named = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ExpertCodes:
    """One projection of experts as released: E2M1 codes, a byte each, [E, out, in]; E8M0 scales [E, out, in / 32]."""

    codes: np.ndarray
    scales: np.ndarray


class PackError(ValueError):
    """Values that the kernel's storage cannot hold; the message names the tensor."""


# The tape


def fill(part: Part, matrices: Mapping[str, np.ndarray], tile_rows: int, tile_cols: int, dtype) -> np.ndarray:
    """The tiles of a part [tiles, tile_rows, tile_cols]. `matrices` [depth, width] by name."""
    tape = np.zeros((part.tiles, tile_rows, tile_cols), dtype)
    for block in part.blocks:
        name, weight = block.matrix.name, matrices[block.matrix.name]
        expected = (block.matrix.depth, block.matrix.width)
        if weight.shape != expected:
            raise PackError(f"{name} has shape {weight.shape}: expected {expected}")
        rows = _rows(block, weight, tile_cols)
        stored = rows.astype(dtype)
        if not np.array_equal(stored.astype(rows.dtype), rows):
            raise PackError(f"{name} holds values that {np.dtype(dtype)} has not: expected a checkpoint of that type")
        for piece in block.pieces:
            tape[piece.tile, piece.row : piece.row + piece.rows] = stored[piece.start : piece.start + piece.rows]
    return tape


def _rows(block: Block, weight: np.ndarray, tile_cols: int) -> np.ndarray:
    """The block's rows [depth, tile_cols]."""
    out = np.zeros((block.depth, tile_cols), weight.dtype)
    if block.matrix.transposed:
        chunk = weight[block.column : block.column + tile_cols].T
        out[: chunk.shape[0], : chunk.shape[1]] = chunk
        return out
    columns = weight[:, block.column : block.column + block.cols]
    for i in range(block.fold):
        part = columns[i * block.depth : (i + 1) * block.depth]
        out[: part.shape[0], i * block.cols : i * block.cols + part.shape[1]] = part
    return out


def _cut(array: np.ndarray, axis: int, rank: int, ranks: int) -> np.ndarray:
    size = array.shape[axis] // ranks
    return np.take(array, range(rank * size, (rank + 1) * size), axis=axis)


@dataclass(frozen=True)
class Packer:
    """Rank `rank`'s arrays, in the shapes of `plan.weights`."""

    plan: Plan
    rank: int

    @property
    def config(self) -> DecodeConfig:
        return self.plan.config

    def cut(self, array: np.ndarray, axis: int) -> np.ndarray:
        return _cut(array, axis, self.rank, self.config.ranks)

    def columns(self, array: np.ndarray) -> np.ndarray:
        """This rank's `columns` of the last axis, zeros behind its end."""
        width = self.config.columns(array.shape[-1])
        mine = array[..., self.rank * width : (self.rank + 1) * width]
        return np.pad(mine, [(0, 0)] * (array.ndim - 1) + [(0, width - mine.shape[-1])])

    def kda(self, w: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
        flat = lambda name: self.cut(w(name), 1).reshape(w(name).shape[0], -1)  # noqa: E731
        return {
            "project": np.concatenate([*(flat(name) for name in "qkvg"), w("f_a")], axis=1),
            "beta": self.cut(w("b"), 1),
            "decay": flat("f_b"),
            "output": self.cut(w("o"), 0).reshape(-1, self.config.hidden),
        }

    def mla(self, w: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
        c = self.config.mla
        query, kv = self.cut(w("q_b"), 1), self.cut(w("kv_b"), 1)
        parts = (query[..., : c.nope], query[..., c.nope :])
        heads = range(kv.shape[1])
        return {
            "down": np.concatenate([self.cut(w("q_a"), 1), self.cut(w("kv_a"), 1)], axis=1),
            "gate": self.cut(w("g"), 1).reshape(self.config.hidden, -1),
            "query": np.concatenate([part.reshape(c.q_rank, -1) for part in parts], axis=1),
            **{f"absorb_{i}": kv[:, i, : c.nope].T for i in heads},
            **{f"value_{i}": kv[:, i, c.nope :] for i in heads},
            "output": self.cut(w("o"), 0).reshape(-1, self.config.hidden),
        }

    def dense(self, w: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
        gate, up = (_widen(self.cut(w(name), 1)) for name in ("gate", "up"))
        return {"hidden": np.concatenate([gate, up], axis=1), "output": self.cut(w("down"), 0)}

    def moe(self, w: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
        return {
            "down": self.columns(w("latent_down")),
            "router": self.cut(w("router"), 1),
            "shared_in": np.concatenate([self.cut(w("shared.gate"), 1), self.cut(w("shared.up"), 1)], axis=1),
            "shared_out": self.columns(w("shared.down")),
            "up": self.columns(w("latent_up")),
        }

    def mixer(self, named: Named, layer: int) -> np.ndarray:
        """A layer's tiles of the tape before its channels' tiles."""
        kind = self.config.layers[layer]
        matrices = self.mla(_of(named, layer, "mla")) if kind.mla else self.kda(_of(named, layer, "kda"))
        return self._tiles(self.plan.tape.parts(kind)[0], matrices)

    def channels(self, named: Named, layer: int) -> np.ndarray:
        kind = self.config.layers[layer]
        matrices = self.moe(_of(named, layer, "moe")) if kind.moe else self.dense(_of(named, layer, "dense"))
        return self._tiles(self.plan.tape.parts(kind)[1], matrices)

    def head(self, named: Named) -> np.ndarray:
        return self._tiles(self.plan.tape.head, {"head": self.cut(named["lm_head"], 1)})

    def _tiles(self, part: Part, matrices: Mapping[str, np.ndarray]) -> np.ndarray:
        blocks = self.config.blocks
        return fill(part, matrices, blocks.tile_rows, blocks.tile_cols, self.config.dtype)

    def tape(self, named: Named) -> np.ndarray:
        """[tiles, tile_rows, tile_cols] of the whole step."""
        layers = range(len(self.config.layers))
        parts = [part(named, layer) for layer in layers for part in (self.mixer, self.channels)]
        return np.concatenate([*parts, self.head(named)])

    def records(self, gate: ExpertCodes, up: ExpertCodes, down: ExpertCodes) -> np.ndarray:
        """[E, *record] of so many whole experts."""
        gate, up = (ExpertCodes(self.cut(x.codes, 1), self.cut(x.scales, 1)) for x in (gate, up))
        down = ExpertCodes(self.cut(down.codes, 2), self.cut(down.scales, 2))
        return pack_records(self.plan.record, gate, up, down)

    def experts(self, named: Mapping[str, ExpertCodes]) -> np.ndarray:
        """[MoE layers, E, *record]."""
        layers = (_of(named, layer, "moe") for layer in self.config.moe_layers)
        return np.stack([self.records(w("w1"), w("w3"), w("w2")) for w in layers])

    def vectors(self, named: Named) -> np.ndarray:
        out = np.zeros(self.plan.weights["vectors"].shape, np.float32)
        for layer, kind in enumerate(self.config.layers):
            names = {"attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}
            if kind.moe:
                names |= {"latent_norm": "moe.latent_norm", "router_bias": "moe.router_bias"}
            if kind.mla:
                names |= {"q_norm": "mla.q_a_norm", "kv_norm": "mla.kv_a_norm"}
            for place, name in names.items():
                vector = named[f"layers.{layer}.{name}"]
                out[layer, VECTORS.index(place), : len(vector)] = vector
        out[-1, 0] = named["norm"]
        return out

    def heads(self, named: Named) -> np.ndarray:
        out = np.zeros(self.plan.weights["heads"].shape, np.float32)
        for i, layer in enumerate(self.config.kda_layers):
            w = _of(named, layer, "kda")
            taps = np.stack([self.cut(w(f"{name}_conv"), 1) for name in "qkv"], axis=1)  # [W, 3, h, K]
            W, _, h, K = taps.shape
            out[i, :, : 3 * W] = taps.reshape(3 * W, h, K).swapaxes(0, 1)
            out[i, :, 3 * W] = self.cut(w("dt_bias"), 0)
            out[i, :, 3 * W + 1] = np.exp(self.cut(w("A_log"), 0))[:, None]
            out[i, :, 3 * W + 2] = w("o_norm")
        return out

    def keys(self, named: Named) -> np.ndarray:
        """Sites in reading order (attention and channels of each layer, then the read-out); the first, layer 0's
        attention, reads no bank."""
        key = lambda prefix: named[f"{prefix}.norm"].astype(np.float32) * named[f"{prefix}.query"]  # noqa: E731
        sites = [f"layers.{i}.{site}_res" for i in range(len(self.config.layers)) for site in ("attn", "ffn")]
        out = np.zeros(self.plan.weights["keys"].shape, np.float32)
        flat = out.reshape(-1, self.config.hidden)
        for i, prefix in enumerate([*sites[1:], "output_attn_res"]):
            flat[i] = key(prefix)
        return out

    def embed(self, named: Named) -> np.ndarray:
        out = np.zeros(self.plan.weights["embed"].shape, self.config.dtype)
        share = self.columns(named["embed"])
        out.reshape(len(out), -1)[:, : share.shape[1]] = share
        return out

    def weights(self, named: Named, experts: Mapping[str, ExpertCodes]) -> dict[str, np.ndarray]:
        made = {name: getattr(self, name)(named) for name in ("tape", "vectors", "heads", "keys", "embed")}
        return made | {"experts": self.experts(experts)}


def _of(named: Mapping, layer: int, kind: str) -> Callable:
    return lambda name: named[f"layers.{layer}.{kind}.{name}"]


def _widen(matrix: np.ndarray) -> np.ndarray:
    """Columns up to whole lane tiles."""
    return np.pad(matrix, ((0, 0), (0, round_up(matrix.shape[1], LANES) - matrix.shape[1])))


# Experts


def pack_records(record: Record, gate: ExpertCodes, up: ExpertCodes, down: ExpertCodes) -> np.ndarray:
    """Records [E, rows, L] of one rank's slices: gate and up [E, F, L], down [E, L, F]."""
    codes = np.concatenate([gate.codes, up.codes], axis=1)
    scales = np.concatenate([gate.scales, up.scales], axis=1)
    parts = (
        _side_by_side(_words(_stretches(record, codes))),
        _words(down.codes.swapaxes(1, 2)),
        _side_by_side(_bytes(_stretches(record, scales))),
        _bytes(down.scales.swapaxes(1, 2)),
    )
    words = np.concatenate(parts, axis=-2)
    out = np.zeros((len(codes), *record.shape), np.uint32)
    out[:, : words.shape[1]] = words
    return out.view(np.int32)


def _stretches(record: Record, weight: np.ndarray) -> np.ndarray:
    """[E, 2F, inputs] -> [E, stretches, rows, 256]; also of scales, which have an input for every 32."""
    pile = weight.reshape(len(weight), record.columns, OUTPUTS, QUARTERS, -1)
    pile = np.moveaxis(pile, (4, 3, 2), (2, 3, 4))  # [E, columns, inputs of a quarter, quarters, outputs]
    return pile.reshape(len(weight), record.stretches, -1, STRETCH)


def _from_stretches(record: Record, stretches: np.ndarray) -> np.ndarray:
    pile = stretches.reshape(len(stretches), record.columns, -1, QUARTERS, OUTPUTS)
    return np.moveaxis(pile, (2, 3, 4), (4, 3, 2)).reshape(len(stretches), 2 * record.expert, -1)


def _side_by_side(stretches: np.ndarray) -> np.ndarray:
    """[E, stretches, rows, 256] -> [E, rows, L]."""
    return np.moveaxis(stretches, 1, 2).reshape(len(stretches), stretches.shape[2], -1)


def _apart(rows: np.ndarray) -> np.ndarray:
    return np.moveaxis(rows.reshape(len(rows), rows.shape[1], -1, STRETCH), 2, 1)


def _words(codes: np.ndarray) -> np.ndarray:
    """[..., 8 R, lanes] codes -> [..., R, lanes] words, the first code in the lowest bits."""
    return _joined(codes, PER_WORD, 4)


def _bytes(scales: np.ndarray) -> np.ndarray:
    """[..., groups, lanes] bytes -> [..., ceil(groups / 4), lanes] words."""
    if scales.max(initial=0) == 255:
        raise PackError("an expert's scale is 255, MXFP4's NaN: expected 0 to 254")
    if scales.min(initial=255) == 0:
        raise PackError("an expert's scale is 0, 2 ** -127, which a TPU flushes to zero: expected 1 to 254")
    missing = -scales.shape[-2] % SCALES
    return _joined(np.pad(scales, [(0, 0)] * (scales.ndim - 2) + [(0, missing), (0, 0)]), SCALES, 8)


def _joined(fields: np.ndarray, count: int, bits: int) -> np.ndarray:
    """`count` rows of fields into one of words."""
    grouped = fields.reshape(*fields.shape[:-2], -1, count, fields.shape[-1]).astype(np.uint32)
    return np.bitwise_or.reduce(grouped << (bits * np.arange(count, dtype=np.uint32))[:, None], axis=-2)


def _split(words: np.ndarray, count: int, bits: int) -> np.ndarray:
    """The inverse of `_joined`."""
    fields = words[..., None, :] >> (bits * np.arange(count, dtype=np.uint32))[:, None] & (2**bits - 1)
    return fields.reshape(*words.shape[:-2], -1, words.shape[-1]).astype(np.uint8)


def unpack_records(record: Record, words: np.ndarray) -> tuple[ExpertCodes, ExpertCodes, ExpertCodes]:
    """The inverse of `pack_records`."""
    words, F = words.view(np.uint32), record.expert
    ends = (record.up_rows, record.up_scale_start, record.down_scale_start)
    codes, down, scales, down_scales = np.split(words, ends, axis=1)
    codes = _from_stretches(record, _split(_apart(codes), PER_WORD, 4))
    scales = _from_stretches(record, _split(_apart(scales), SCALES, 8)[:, :, : record.groups])
    down = _split(down, PER_WORD, 4).swapaxes(1, 2)
    down_scales = _split(down_scales, SCALES, 8)[:, : F // GROUP].swapaxes(1, 2)
    gate, up = (ExpertCodes(codes[:, part], scales[:, part]) for part in (slice(0, F), slice(F, 2 * F)))
    return gate, up, ExpertCodes(down, down_scales)
