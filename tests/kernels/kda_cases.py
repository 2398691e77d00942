"""The cases that every implementation of Kimi Delta Attention must pass: shapes, regimes of the inputs, segments.

The number in an id is that of the survey of other projects' tests (spec/kda-kernels.md 5.2). Of a test that also sets
what our operation does not have, the shapes and inputs are a case. Not, or not wholly, in `CASES`:

- 18, 52 (pools of decode states): the caller gathers slots. What is left, rows that must stay untouched, is `DECODE`.
- 40, 49 (splits): `SPLITS`. 46, 50, 53, 66 (several calls, sharding, no tokens): test_kda_properties.py.
- 42, 65 (padding): every padding token of every case holds NaN. 56: test_kda_causality.py. 19, 62: test_kda_gate.py.
- 9, 13, 14 (length of a chunk, recomputation), 45 (order of chunks): an implementation's own business.
- 6, 17, 60 (gate, sigmoid, L2 norm inside the kernel): outside the operation; differentiated in test_kda_golden.py.
- 20 (states between chunks), 21 (transposed state), 30 (bfloat16 final state): not results of ours.
- 22 to 26, 28, 64, the ranks of 27 and 39 (context parallel), 29, 53 (convolution): not arguments of ours.
  test_kda_properties.py has `kda_combine`, with which ranks fold their parts.
- 54, 55, 63's boundary of 512 (state commits, prefix hits): of a serving engine.
"""

import dataclasses
import itertools
import zlib

import jax.numpy as jnp
import numpy as np

from tests.kernels.kda_makers import (
    Maker,
    alternating,
    between,
    bounded,
    constant,
    copies,
    correlated,
    logsigmoid,
    masked,
    normal,
    off_centre,
    per_head,
    rows,
    scaled,
    softplus,
    spread,
    then,
    unit,
    zeros,
)
from tests.kernels.kda_oracle import TOKENS, Run

# Every implementation that must pass; conftest.py runs "pallas" in interpret mode.
IMPLEMENTATIONS = ["xla", "pallas"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes, how each input is made, and how exact the results must be.

    `HV` and `V` are H and K by default. `ids` has a word per row: a letter per segment, dots for padding. `state` is
    the type of the initial state, or None. `split` is where `SPLITS` begin a second call. `kind` chooses the tolerance:
    "plain", "steep" (results are small differences of large terms), "correlated" keys at slow gates, less so "alike",
    "alternating" or "reflected" in sign, "one key", "copies" of one token, "forgetful" gates, "raw" keys under which
    the state grows, "grouped" value heads.
    """

    id: str
    B: int
    T: int
    H: int
    K: int
    HV: int | None = None
    V: int | None = None
    q: Maker = unit
    k: Maker = unit
    v: Maker = normal
    g: Maker = between(-5, 0)
    beta: Maker = between(0, 1)
    bound: float | None = None
    scale: float | None = None
    dtype: str = "float32"
    state: str | None = "float32"
    offsets: tuple[int, ...] | None = None
    ids: tuple[str, ...] | None = None
    split: int | None = None
    gradients: bool = True
    kind: str = "plain"
    slow: bool = False

    def __post_init__(self):
        object.__setattr__(self, "HV", self.HV or self.H)
        object.__setattr__(self, "V", self.V or self.K)

    def cut(self, heads: int = 4, length: int = 4096) -> "Case":
        """With at most so many value heads and tokens: what an interpreter has time for."""
        group, length = self.HV // self.H, min(self.T, length)
        H = min(self.H, max(heads // group, 1))
        offsets = self.offsets and tuple(min(x, length) for x in self.offsets)
        return dataclasses.replace(self, T=length, H=H, HV=H * group, offsets=offsets)

    def runs(self) -> list[Run]:
        """The segments."""
        if self.offsets:
            return [Run(0, np.arange(a, z), n, n) for n, (a, z) in enumerate(itertools.pairwise(self.offsets))]
        if not self.ids:
            return [Run(b, np.arange(self.T), b, b) for b in range(self.B)]
        return [run for row, word in enumerate(self.ids) for run in _runs_of(row, word)]

    def padding(self) -> np.ndarray:
        """[B, T], true outside every segment."""
        mask = np.ones((self.B, self.T), bool)
        for run in self.runs():
            mask[run.row, run.tokens] = False
        return mask

    def arguments(self) -> dict[str, np.ndarray]:
        """The arrays that `chunk_kda` is called with."""
        keys, values = (self.B, self.T, self.H, self.K), (self.B, self.T, self.HV, self.V)
        shapes = {"q": keys, "k": keys, "v": values, "g": (*values[:3], self.K), "beta": values[:3]}
        made, padding = {}, self.padding()
        for name in TOKENS:
            x = np.array(getattr(self, name)(self._random(name), shapes[name]), np.float32)
            x[padding] = np.nan
            made[name] = x if name == "g" else x.astype(jnp.dtype(self.dtype))
        if self.state:
            state = normal(self._random("initial_state"), self._shape_of_states())
            made["initial_state"] = state.astype(jnp.dtype(self.state))
        if self.ids:
            made["segment_ids"] = np.array([_ids_of(word) for word in self.ids], np.int32)
        if self.offsets:
            made["segment_offsets"] = np.array(self.offsets, np.int32)
        return made

    def cotangents(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the outputs, huge where padding is, and of the final states."""
        do = normal(self._random("do"), (self.B, self.T, self.HV, self.V))
        do[self.padding()] = 1e30
        return do.astype(jnp.dtype(self.dtype)), normal(self._random("dstate"), self._shape_of_states())

    def _shape_of_states(self):
        return len(self.offsets) - 1 if self.offsets else self.B, self.HV, self.K, self.V

    def _random(self, name):
        return np.random.default_rng(zlib.crc32(f"{self.id} {name}".encode()))


def _ids_of(word: str) -> list[int]:
    return [-1 - t % 2 if letter == "." else ord(letter) - ord("a") for t, letter in enumerate(word)]


def _runs_of(row: int, word: str) -> list[Run]:
    """The segments of a row: the first starts from its initial state, the last ends in its final one."""
    letters = np.array(list(word))
    (valid,) = np.nonzero(letters != ".")
    parts = np.split(valid, np.flatnonzero(letters[valid][1:] != letters[valid][:-1]) + 1)
    last = len(parts) - 1
    return [Run(row, x, row if n == 0 else None, row if n == last else None) for n, x in enumerate(parts)]


def _both_forms(*cases: Case) -> list[Case]:
    """With K3's bound promised and without."""
    forms = {"bounded": -5.0, "any": None}
    return [dataclasses.replace(x, id=f"{x.id}-{name}", bound=bound) for x in cases for name, bound in forms.items()]


def _bfloat16(*cases: Case) -> list[Case]:
    return [dataclasses.replace(case, id=f"{case.id}-bf16", dtype="bfloat16") for case in cases]


def _slow(*cases: Case) -> list[Case]:
    return [dataclasses.replace(case, slow=True) for case in cases]


def _offsets(*lengths: int) -> tuple[int, ...]:
    return (0, *itertools.accumulate(lengths))


def _random_offsets(segments: int, length: int) -> tuple[int, ...]:
    cuts = np.random.default_rng(segments).choice(np.arange(1, length), segments - 1, replace=False)
    return (0, *np.sort(cuts).tolist(), length)


# Shapes that many cases share: a program for each form and type.
SMALL = {"B": 1, "T": 96, "H": 2, "K": 32, "V": 24}
REPETITIVE = {"B": 1, "T": 512, "H": 1, "K": 64, "V": 32}


def _fla() -> list[Case]:
    g, K3 = {"g": logsigmoid()}, {"g": bounded(), "bound": -5.0}
    thirds = {"B": 1, "T": 1000, "H": 4, "K": 64, "offsets": (0, 256, 500, 1000)}
    small = [
        Case("fla-1-T63", 1, 63, 1, 64, **g),
        Case("fla-2-T500-D60", 2, 500, 3, 60, **g),
        Case("fla-9-HV4-of-2", 2, 160, 2, 64, HV=4, **g, kind="grouped"),
        Case("fla-10-T15", 1, 15, 4, 60, **g, offsets=(0, 15)),
        Case("fla-14-segments", 1, 160, 4, 64, **g, offsets=(0, 31, 96, 160)),
        Case("fla-17-T96", 2, 96, 2, 64, **K3),
        Case("fla-17-T96-beta-to-2", 2, 96, 2, 64, **K3, beta=between(0, 2)),
    ]
    large = [
        Case("fla-3-half-kept", 2, 1000, 3, 64, g=masked(logsigmoid(), 0.5, 0)),
        Case("fla-3-half-forgotten", 2, 1000, 3, 64, g=masked(logsigmoid(), 0.5, -1000)),
        Case("fla-4-fast-decay-D100", 3, 1024, 4, 100, g=logsigmoid(0.1)),
        Case("fla-5-scale-0.1", 4, 1024, 4, 128, **g, scale=0.1),
        Case("fla-5-scale-1", 4, 1024, 4, 128, **g, scale=1.0),
        Case("fla-6-slow-decay", 2, 1500, 4, 128, g=softplus(0.1, 1.6)),
        Case("fla-7-T2048-H8", 4, 2048, 8, 64, **g),
        Case("fla-8-HV4-of-2", 2, 1024, 2, 64, HV=4, **g, kind="grouped"),
        Case("fla-8-HV8-of-2", 2, 1024, 2, 64, HV=8, **g, kind="grouped"),
        Case("fla-8-HV8-of-4-D128", 2, 1024, 4, 128, HV=8, **g, kind="grouped"),
        Case("fla-11-half-forgotten", **thirds, g=masked(logsigmoid(), 0.5, -1000)),
        Case("fla-11-most-forgotten", **thirds, g=masked(logsigmoid(), 0.9, -1000)),
        Case("fla-12-segments-D100", 1, 2000, 4, 100, **g, offsets=(0, 15, 100, 300, 1200, 2000)),
        Case("fla-13-segments-D256", 1, 4096, 4, 256, **K3, offsets=(0, 100, 300, 1200, 3000, 4096)),
        Case("fla-16-T64", 1, 64, 1, 64, **g),
        Case("fla-16-T512-D60", 2, 512, 3, 60, **g),
        Case("fla-16-T1024-D128", 4, 1024, 4, 128, **g),
    ]
    full = {"B": 1, "T": 8192, "H": 96, "K": 128, "dtype": "bfloat16"} | K3
    huge = [
        Case("fla-15-inference", 1, 8192, 4, 128, **g, offsets=(0, 8192), gradients=False),
        Case("fla-17-T8192-H96", **full),
        Case("fla-17-T8192-H96-beta-to-2", **full, beta=between(0, 2)),
    ]
    return small + _slow(*_bfloat16(*small), *large, *_bfloat16(*large), *huge)


def _flashkda() -> list[Case]:
    """30 has three kinds of initial state, which its sizes take in turn."""
    g, grid = {"g": bounded(), "bound": -5.0}, []
    lengths, heads, states = (16, 17, 37, 64, 97, 256, 1024, 4096, 8192), (1, 4, 32, 96), ("float32", None, "bfloat16")
    for (i, H), (j, T) in itertools.product(enumerate(heads), enumerate(lengths)):
        options = {"state": states[(i + j) % 3], "dtype": "float32" if H < 32 else "bfloat16"}
        grid.append(Case(f"flashkda-30-H{H}-T{T}", 1, T, H, 128, **g, **options, slow=H * T > 17))
    same = {"q": copies(unit), "k": copies(unit), "v": copies(normal)}
    small = [
        Case("flashkda-31-4-8-12", 1, 24, 2, 128, **g, offsets=_offsets(4, 8, 12)),
        Case("flashkda-35-16-copies", 1, 16, 1, 128, **g, **same),
    ]
    packed = [(16,), (16, 16), (64, 128, 256), (20, 50, 100), (17, 33, 65), (1300, 547, 2048, 963, 271, 3063)]
    packed = {"-".join(map(str, x)): x for x in packed} | {"8x1024": (1024,) * 8}
    large = [Case(f"flashkda-31-{n}", 1, sum(x), 4, 128, **g, offsets=_offsets(*x)) for n, x in packed.items()]
    large += [Case(f"flashkda-32-B{B}-T{T}", B, T, 4, 128, **g) for B, T in ((2, 64), (2, 1024), (4, 256), (8, 128))]
    inference = {"H": 1, "K": 128, "dtype": "bfloat16", "gradients": False} | g
    huge = [
        Case("flashkda-33-T131072", 1, 2**17, **inference),
        Case("flashkda-33-T1048576", 1, 2**20, **inference),
        Case("flashkda-33-two-halves-of-1048576", 1, 2**20, **inference, offsets=(0, 2**19, 2**20)),
    ]
    return grid + small + _flashkda_gates() + _slow(*large, *_bfloat16(*large), *huge)


def _flashkda_gates() -> list[Case]:
    logits = {str(x): constant(x) for x in (-8, -4, 0, 8)} | {"uniform": between(-8, 8), "normal": scaled(normal, 8)}
    biases = {str(x): constant(x) for x in (-8, -4, 4, 8)} | {"uniform": between(-8, 8), "normal": normal}
    return [
        Case(f"flashkda-34-logits-{x}-bias-{y}", **SMALL, g=bounded(logits[x], biases[y]), bound=-5.0, kind="steep")
        for x, y in itertools.product(logits, biases)
    ]


def _tokamax() -> list[Case]:
    g, slow_gate = {"g": logsigmoid()}, {"g": between(-0.01, 0), "bound": -0.01}
    boundaries = (0, 392, 777, 1024, 3241, 5120, 7777, 8192)
    small = [
        Case("tokamax-37-K129-V127", 1, 80, 2, 129, V=127, **g),
        Case("tokamax-38-T256-bound-0.01", 1, 256, 2, 32, **slow_gate, offsets=_offsets(45, 80, 20)),
    ]
    pairs = [(D, D) for D in (16, 32, 64, 128, 256)] + [(16, 32), (32, 16), (128, 64), (64, 128)]
    large = [Case(f"tokamax-37-K{K}-V{V}", 1, 128, 2, K, V=V, **g) for K, V in pairs]
    for room in (8, 64):
        offsets = _offsets(45, 80, 20, *(0,) * (room - 3))
        large.append(Case(f"tokamax-38-3-segments-of-{room}", 1, 256, 2, 64, **slow_gate, offsets=offsets))
    for segments, T in ((10, 8192), (25, 2048), (40, 2048), (45, 2048), (85, 2048)):
        offsets = _random_offsets(segments, T)
        large.append(Case(f"tokamax-38-{segments}-segments", 1, T, 2, 64, **g, offsets=offsets))
    large += [
        Case("tokamax-38-T128", 1, 128, 2, 64, **g, offsets=_offsets(30, 50)),
        Case("tokamax-38-T192", 1, 192, 2, 64, **g, offsets=(0, 100)),
        Case("tokamax-39-T8192", 1, 8192, 2, 64, **g, offsets=boundaries),
        Case("tokamax-41-masked", 2, 256, 2, 64, g=masked(logsigmoid(), 0.3, 0)),
    ]
    return small + _slow(*_bfloat16(*small), *large, *_bfloat16(*large))


def _servers() -> list[Case]:
    """sglang-jax and tpu-inference."""
    ragged = {"B": 1, "T": 331, "H": 2, "K": 32, "offsets": _offsets(1, 37, 64, 100, 129)}
    lengths = (0, 1023, 1025, *(1024,) * 30)
    small = [
        Case("tpuinf-47-bounded", **ragged, g=bounded(), bound=-5.0),
        *_both_forms(
            Case("tpuinf-48-floor", **SMALL, g=constant(-5), kind="steep"),
            Case("tpuinf-48-one", **SMALL, g=constant(0)),
            Case("tpuinf-51-gate-per-head", **SMALL, g=per_head(bounded())),
        ),
    ]
    large = [
        Case("sglang-43-T16384", 1, 16384, 1, 128, g=logsigmoid()),
        Case("sglang-43-T32768", 1, 32768, 1, 128, g=logsigmoid()),
        Case("sglang-44-an-empty-segment", 1, 32768, 1, 64, g=logsigmoid(), offsets=_offsets(*lengths)),
        Case("sglang-44-no-empty-segment", 1, 32768, 1, 64, g=logsigmoid(), offsets=_offsets(*lengths[1:])),
        Case("sglang-45-3-0-5", 1, 8, 2, 64, g=logsigmoid(), offsets=(0, 3, 3, 8)),
        Case("tpuinf-47-any", **ragged, g=softplus(1, 4)),
    ]
    return small + _slow(*large, *_bfloat16(*large))


def _ours() -> list[Case]:
    alike = {"kind": "alike"}
    small = [
        Case("ours-57-cosine-0.9", **SMALL, **alike, k=correlated(0.9), g=constant(-0.01), beta=constant(0.9)),
        Case("ours-57-alternating", **SMALL, k=alternating, g=constant(-0.01), beta=constant(1.9), kind="reflected"),
        Case("ours-58-floor-then-open", **SMALL, **alike, k=copies(unit), g=then(64, constant(-5), constant(0))),
        Case("ours-60-zero-rows", **SMALL, q=then(20, zeros, unit), k=then(40, unit, zeros)),
        *(Case(f"ours-61-beta-{x}", **SMALL, beta=constant(x)) for x in (0, 1, 2)),
        Case("ours-uniform", **SMALL),
    ]
    forgetting = masked(softplus(1, 4), 0.05, -1000)
    unbounded = [
        Case("ours-59-some-forgotten", **SMALL, g=then(64, forgetting, softplus(1, 4)), kind="forgetful"),
        Case("ours-half-forgotten", **SMALL, g=masked(masked(between(-0.5, 0), 0.5, -1000), 0.1, -np.inf)),
        Case("ours-a-channel-forgotten-at-every-step", **SMALL, g=spread(*[-0.01] * 7, -25.8)),
    ]
    constants, spans = (-0.05, -1.0, -2.5, -4.999, -5.0), (-0.05, -0.5, -2.0, -5.0)
    regimes = [*(constant(x) for x in constants), *(between(x, 0) for x in spans)]
    lengths = (1, 17, 65, 15, 16, 63, 64, 130, 1000)
    lengths = [Case(f"ours-regimes-T{T}", 9, T, 1, 16, V=24, g=rows(*regimes)) for T in lengths]
    raw = {"B": 2, "H": 4, "K": 32, "q": normal, "k": normal, "beta": normal, "g": softplus(1, 4), "state": None}
    raw = {T: Case(f"ours-67-T{T}", T=T, **raw, kind="raw") for T in (1, 16, 64, 128)}
    return [
        *_both_forms(*small),
        *_bfloat16(*_both_forms(*small), *unbounded[1:]),
        *unbounded,
        *_both_forms(*lengths[:3], Case("ours-HV6-of-2", 2, 40, 2, 24, HV=6, V=8, beta=between(0, 2))),
        Case("ours-lowest-bound", 2, 33, 1, 16, g=rows(constant(-5.9), between(-5.9, 0)), bound=-5.9),
        raw.pop(16),
        *_slow(*_both_forms(*lengths[3:]), *raw.values()),
    ]


def _segments() -> list[Case]:
    """36, 42, 65: resets at, before and after multiples of 16, segments of one token and of none, padding anywhere."""
    gate = between(-0.5, 0)
    ids = (
        "a" * 16 + "b" * 16 + "c" * 8,
        "a" * 15 + "b" * 2 + "c" * 14 + "d" * 9,
        "....." + "a" * 20 + "bcde" + "f" * 11,
        "a" * 7 + "." * 6 + "a" * 7 + "b" * 3 + "." * 14 + "b" * 3,
        "a" * 10 + "." * 10 + "b" * 5 + "a" * 5 + "." * 10,
        "." * 17 + "z" * 23,
        "." * 40,
    )
    lengths = {"36-some-empty": (0, 33, 0, 0, 0, 0), "36-all-empty": (0,) * 6, "some-of-1": (5, 0, 17, 16, 1, 1)}
    packed = [Case(f"ours-{n}", 1, 43, 2, 8, V=12, g=gate, offsets=_offsets(*x)) for n, x in lengths.items()]
    drafts = tuple("a" * n + "." * (8 - n) for n in range(9))
    return [
        *_both_forms(Case("ours-65-ids", len(ids), 40, 2, 8, V=12, g=gate, ids=ids), *packed),
        Case("ours-63-some-of-8-drafts", len(drafts), 8, 2, 32, g=bounded(), bound=-5.0, ids=drafts),
    ]


def _correlated() -> list[Case]:
    """Keys and gates of trained models, where an inverse by powers of a matrix loses every digit."""
    one, same = {"beta": constant(1)}, {"q": copies(unit), "k": copies(unit), "v": copies(normal)}
    cases = [
        Case(f"correlated-{rho}-gate{gate}", **REPETITIVE, k=correlated(rho), g=constant(gate), **one)
        for rho, gate in ((0, -1e-4), (0.9, -0.01), (0.9, -1e-4), (0.99, -0.01), (0.99, -1e-4), (1, -1e-4))
    ]
    cases += [
        Case("correlated-512-copies", **REPETITIVE, **same, g=constant(-1e-4), **one),
        Case("correlated-halves", **REPETITIVE, k=correlated(0.9), g=spread(-0.001, -4.99), **one),
        Case("correlated-alternating", **REPETITIVE, k=alternating, g=constant(-1e-4), beta=constant(1.9)),
    ]
    steps = masked(constant(-1e-4), 0.01, -1000)
    cases = [*_both_forms(*cases), Case("correlated-steps-of-1000", **REPETITIVE, k=correlated(0.9), g=steps, **one)]
    off = {"k": off_centre, "g": logsigmoid(), "offsets": _offsets(100, 24, 300, 6, 1, 200, 393)}
    off = _slow(Case("fla-27-off-centre", 1, 1024, 4, 128, **off))
    kinds = {"correlated-512-copies": "copies", "correlated-alternating": "alternating", "correlated-1-": "one key"}
    kind = lambda case: next((kind for name, kind in kinds.items() if case.id.startswith(name)), "correlated")  # noqa: E731
    cases = [dataclasses.replace(case, kind=kind(case)) for case in cases + off]
    return cases + [dataclasses.replace(x, slow=x.slow or x.bound is None) for x in _bfloat16(*cases)]


CASES = [*_fla(), *_flashkda(), *_tokamax(), *_servers(), *_ours(), *_segments(), *_correlated()]
# In two calls, the second from the state of the first.
SPLITS = [
    Case("tpuinf-49-at-37", 1, 137, 2, 32, g=bounded(), bound=-5.0, split=37),
    *_slow(*(Case(f"tpuinf-49-at-{x}", 1, 137, 2, 32, g=bounded(), bound=-5.0, split=x) for x in (64, 100))),
    *_slow(*(Case(f"tokamax-40-at-{x}", 1, 512, 2, 64, g=logsigmoid(), split=x) for x in (384, 256, 192))),
]
# 18, 52: one token for some of the rows; the others must keep their states. For `recurrent_kda`.
DECODE = [
    Case(f"decode-{name}", rows_, 1, H, K, g=bounded(), ids=("a",) * live + (".",) * (rows_ - live))
    for name, rows_, H, K, live in (
        ("18-16x16x128", 16, 16, 128, 11),
        ("18-32x8x64", 32, 8, 64, 32),
        ("18-7x32x128", 7, 32, 128, 3),
        ("52-bucket-of-32", 32, 2, 32, 4),
    )
] + [
    Case(
        "decode-drafts", 3, 4, 2, 24, HV=4, V=40, g=logsigmoid(), ids=("aabb", ".a.b", "...."), dtype=dtype, state=state
    )
    for dtype, state in (("float32", "float32"), ("bfloat16", None))
]
