"""A model of the time of a decode step on one core: what it issues and waits for, in the order of its program.

HBM serves copies one after the other in the order in which they are issued, at one rate. An exchange takes a latency,
or as long as its bytes need on the links if that is longer. Arithmetic takes its time and overlaps with both only where
the program issues them before and waits after. So no more bytes hide under an exchange than the program has room for:
a tile of the ring is issued when the one before in its bank is released.

Known to be left out: latency of a single copy, refresh and conflicts of HBM, skew between ranks, launch of the program.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rates:
    """Constants of the model: seconds per exchange, bytes per second of HBM and of the links of one core, bundles per
    second. Published of other kernels on TPU7x, measured by their authors; see docs/kernels.md."""

    phase: float = 4.0e-6
    hbm: float = 3.05e12
    bundles: float = 1.43e9
    links: float = 134e9


@dataclass(frozen=True)
class Fetch:
    """Issue a copy from (or to) HBM."""

    key: object
    bytes: float


@dataclass(frozen=True)
class Wait:
    """Until what was issued under this key has arrived."""

    key: object


@dataclass(frozen=True)
class Send:
    """Issue an exchange in which the rank puts so many bytes on its links."""

    key: object
    bytes: float


@dataclass(frozen=True)
class Compute:
    seconds: float


Instruction = Fetch | Wait | Send | Compute


@dataclass
class Times:
    """Seconds of a step, and of them computing, waiting for exchanges and for HBM; bytes issued, exchanges sent."""

    now: float = 0.0
    compute: float = 0.0
    exchanges: float = 0.0
    hbm: float = 0.0
    bytes: float = 0.0
    sends: int = 0
    hbm_free: float = 0.0
    arrival: dict[object, tuple[str, float]] = field(default_factory=dict)


def play(program: Iterable[Instruction], rates: Rates) -> Times:
    """Raises KeyError if the program waits for what it has not issued, or twice."""
    t = Times()
    for x in program:
        match x:
            case Fetch(key, size):
                t.bytes += size
                t.hbm_free = max(t.hbm_free, t.now) + size / rates.hbm
                t.arrival[key] = "hbm", t.hbm_free
            case Send(key, size):
                t.sends += 1
                t.arrival[key] = "exchanges", t.now + max(rates.phase, size / rates.links)
            case Wait(key):
                kind, end = t.arrival.pop(key)
                late = max(0.0, end - t.now)
                setattr(t, kind, getattr(t, kind) + late)
                t.now += late
            case Compute(seconds):
                t.compute += seconds
                t.now += seconds
    return t
