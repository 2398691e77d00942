"""The step as stages between exchanges, and its program for the model of time (`timeline`), from the plan and the
bundles of each stage.

A stage uses matrices of the tape in their order and ends with an exchange, or where its layer's part ends. What it does
before it waits for the exchange before runs beside that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pallas_kernels.decode.config import LayerKind
from pallas_kernels.decode.ledger import Ledger, padded_bytes
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.tape import Part, Piece
from pallas_kernels.decode.timeline import Compute, Fetch, Instruction, Rates, Send, Wait

START_BLOCK, MIX, EMBED, HEAD = "attn_res.block", "attn_res.mix", "embed", "head"


@dataclass(frozen=True)
class Stage:
    """`during`: matrices used before the exchange `awaits` is waited for; `early` is waited for at the stage's
    beginning, `late` when its experts are being fetched. `experts`, `attention`: what else it does, after its matrices
    called `before` and before the others."""

    name: str
    matrices: tuple[str, ...] = ()
    during: tuple[str, ...] = ()
    experts: bool = False
    attention: bool = False
    before: tuple[str, ...] = ()
    ends: str | None = None
    awaits: str | None = None
    early: str | None = None
    late: str | None = None


def mixer_stages(plan: Plan, mla: bool) -> tuple[Stage, ...]:
    """Up to the sending of a sum, whose other stages (`sum_stages`) both kinds have in common."""
    before = plan.mixer_exchanges(mla)[: -len(plan.sum_exchanges("mixer_sum"))]
    ends = (*before, plan.sum_exchanges("mixer_sum")[0])
    if not mla:
        return _chained((Stage("kda.mix", ("project", "beta", "decay", "output")),), (None,), ends)
    heads = range(plan.config.share(plan.config.mla.heads))
    absorb, values = (tuple(f"{name}_{i}" for i in heads) for name in ("absorb", "value"))
    queries, outputs = ("query", *absorb), (*values, "output")
    down = Stage("mla.down", ("down",))
    if plan.config.cache_ranks == 1:
        rest = (Stage("mla.attend", (*queries, *outputs), ("gate",), attention=True, before=queries),)
    else:
        rest = (
            Stage("mla.query", queries, ("gate",)),
            Stage("mla.attend", attention=True),
            Stage("mla.merge", outputs),
        )
    return _chained((down, *rest), (None, *before), ends)


def sum_stages(plan: Plan) -> tuple[Stage, ...]:
    """From a mixer's sum on its way to the channels' input."""
    sums = plan.sum_exchanges("mixer_sum")
    stages = [Stage(f"mixer.sum{i}") for i in range(1, len(sums))]
    return _chained((*stages, Stage("mixer.end")), sums, (*sums[1:], None))


def channel_stages(plan: Plan, moe: bool) -> tuple[Stage, ...]:
    if not moe:
        return _ended("dense", (Stage("dense.hidden", ("hidden", "output")),), plan.channel_exchanges(False))
    sums = tuple(Stage(f"moe.sum{i}") for i in range(1, len(plan.sum_exchanges("latent_sum"))))
    summed = (*sums, Stage("moe.up", ("up",)))
    chain = (Stage("moe.route", ("router",)), Stage("moe.experts", experts=True, late="latents"), *summed)
    route, experts, after, *rest = _ended("moe", chain, plan.channel_exchanges(True))
    beside = Stage("moe.latents", ("down",), ends="latents"), Stage("moe.shared", ("shared_in",), ends="shared")
    return (route, *beside, experts, replace(after, during=("shared_out",), early="shared"), *rest)


def _ended(kind: str, stages: tuple[Stage, ...], exchanges: tuple[str, ...]) -> tuple[Stage, ...]:
    """The stages with the exchanges that end them; behind those of the last ones nothing but their sums is left."""
    sums = range(1, len(exchanges) - len(stages) + 1)
    stages = (*stages, *(Stage(f"{kind}.sum{i}") for i in sums), Stage(f"{kind}.end"))
    return _chained(stages, (None, *exchanges), (*exchanges, None))


def _chained(stages: Sequence[Stage], awaits: Sequence[str | None], ends: Sequence[str | None]) -> tuple[Stage, ...]:
    return tuple(replace(x, awaits=a, ends=end) for x, a, end in zip(stages, awaits, ends, strict=True))


@dataclass(frozen=True)
class StageBundles:
    """Bundles of one execution: what is executed once, before an exchange is awaited (`during`), in a stage with
    experts before they are fetched (`first`; `once` is what comes before the first is awaited) and for each chosen one,
    with attention for each tile of a row's cache."""

    once: float
    during: float = 0.0
    first: float = 0.0
    expert: float = 0.0
    tile: float = 0.0


@dataclass(frozen=True)
class StepProgram:
    """The instructions of one rank. `tokens`: in the cache of every row."""

    plan: Plan
    bundles: Mapping[str, StageBundles]
    rates: Rates
    tokens: int

    def __iter__(self) -> Iterator[Instruction]:
        c, tape = self.plan.config, self.plan.tape
        for tile in range(c.blocks.banks):
            yield self._tile(tile)
        yield Fetch("states", self._states)
        yield from self._plain(EMBED)
        yield from self._exchange("hidden")
        for layer, (kind, (mixer, channels)) in enumerate(zip(c.layers, tape.starts, strict=True)):
            yield from self._layer(layer, kind, mixer, channels)
        pieces = self._pieces(tape.head, tape.head_start, ("head",))
        yield from self._products(pieces, self.bundles[HEAD].once)
        yield from self._exchange("token")

    def _layer(self, layer: int, kind: LayerKind, mixer_start: int, channels_start: int) -> Iterator[Instruction]:
        mixer, channels = self.plan.tape.parts(kind)
        yield Fetch(("small", layer), self._small(layer, kind))
        yield from self._plain(MIX)
        yield from self._part(mixer_stages(self.plan, kind.mla), mixer, mixer_start)
        if layer % self.plan.config.attn_res_block == 0:
            yield from self._plain(START_BLOCK)
        yield from self._part(sum_stages(self.plan), mixer, mixer_start)
        yield from self._part(channel_stages(self.plan, kind.moe), channels, channels_start)

    def _part(self, stages: tuple[Stage, ...], part: Part, start: int) -> Iterator[Instruction]:
        for stage in stages:
            count = self.bundles[stage.name]
            if stage.early:
                yield Wait(stage.early)
            yield from self._products(self._pieces(part, start, stage.during), count.during)
            if stage.awaits:
                yield Wait(stage.awaits)
            yield from self._stage(stage, part, start, count.once)
            if stage.ends:
                yield Send(stage.ends, self.plan.exchanges[stage.ends].sent(self.plan.config.ranks))

    def _stage(self, stage: Stage, part: Part, start: int, bundles: float) -> Iterator[Instruction]:
        before = self._pieces(part, start, stage.before)
        after = self._pieces(part, start, tuple(name for name in stage.matrices if name not in stage.before))
        total = sum(p.rows for p in (*before, *after))
        share = sum(p.rows for p in before) / total if total else 1.0
        if stage.experts:
            yield self._compute(self.bundles[stage.name].first)
            yield from self._start_experts()
            if stage.late:
                yield Wait(stage.late)
        yield from self._products(before, share * bundles)
        if stage.experts:
            yield from self._experts(self.bundles[stage.name].expert)
        if stage.attention:
            yield from self._attention(self.bundles[stage.name].tile)
        yield from self._products(after, (1 - share) * bundles)

    def _products(self, pieces: list[Piece], bundles: float) -> Iterator[Instruction]:
        """Bundles are spread over the rows of the pieces."""
        if not pieces:
            yield self._compute(bundles)
            return
        rows, banks = sum(piece.rows for piece in pieces), self.plan.config.blocks.banks
        for piece in pieces:
            yield from (Wait(("tile", tile)) for tile in piece.awaited)
            yield self._compute(bundles * piece.rows / rows)
            yield from (self._tile(tile + banks) for tile in piece.freed if tile + banks < self.plan.tape.tiles)

    def _pieces(self, part: Part, start: int, names: tuple[str, ...]) -> list[Piece]:
        """Of these matrices, with numbers of tiles on the whole tape."""
        found = [piece for name in names for block in part.of(name) for piece in block.pieces]
        moved = lambda tiles: tuple(start + tile for tile in tiles)  # noqa: E731
        return [replace(p, tile=start + p.tile, awaited=moved(p.awaited), freed=moved(p.freed)) for p in found]

    def _start_experts(self) -> Iterator[Instruction]:
        for j in range(min(self.plan.config.blocks.expert_slots, self._choices)):
            yield Fetch(("expert", j), self._record)

    def _experts(self, bundles: float) -> Iterator[Instruction]:
        slots, hand = self.plan.config.blocks.expert_slots, self.plan.hand
        for first in range(0, self._choices, hand):
            together = range(first, first + hand)
            yield from (Wait(("expert", j)) for j in together)
            yield self._compute(hand * bundles)
            yield from (Fetch(("expert", j + slots), self._record) for j in together if j + slots < self._choices)

    def _attention(self, bundles: float) -> Iterator[Instruction]:
        """Tiles of the fullest rank, two at a time."""
        c = self.plan.config
        size = c.blocks.cache_rows * c.key_width * 2
        tiles = -(-max(self.tokens, 1) // (c.blocks.cache_rows * c.cache_ranks))
        for _ in range(c.rows):
            yield Fetch(("cache", 0), size)
            for j in range(tiles):
                yield Wait(("cache", j))
                if j + 1 < tiles:
                    yield Fetch(("cache", j + 1), size)
                yield self._compute(bundles)

    @property
    def _choices(self) -> int:
        return self.plan.config.rows * self.plan.config.moe.top_k

    @property
    def _record(self) -> int:
        rows, lanes = self.plan.record.shape
        return 4 * rows * lanes

    @property
    def _states(self) -> int:
        """Read or written per layer."""
        return Ledger(self.plan).states

    def _small(self, layer: int, kind: LayerKind) -> float:
        """What is fetched a layer ahead, and waited for by nobody here: vectors, states both ways, keys of a block."""
        weights, c = self.plan.weights, self.plan.config
        each = lambda name: padded_bytes(weights[name]) / max(weights[name].shape[0], 1)  # noqa: E731
        states = 0.0 if kind.mla else 2 * self._states + each("heads")
        return each("vectors") + states + (each("keys") if layer % c.attn_res_block == 0 else 0.0)

    def _tile(self, tile: int) -> Fetch:
        blocks = self.plan.config.blocks
        return Fetch(("tile", tile), 2 * blocks.tile_rows * blocks.tile_cols)

    def _plain(self, name: str) -> Iterator[Instruction]:
        yield self._compute(self.bundles[name].once)

    def _exchange(self, name: str) -> Iterator[Instruction]:
        yield Send(name, self.plan.exchanges[name].sent(self.plan.config.ranks))
        yield Wait(name)

    def _compute(self, bundles: float) -> Compute:
        return Compute(bundles / self.rates.bundles)
