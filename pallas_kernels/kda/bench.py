"""What `k3 bench kda` measures: the operation as a layer calls it, on flat inputs, forward and with its gradients."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.common import aot
from pallas_kernels.kda.api import Implementation, chunk_kda, kda_from_raw_gate
from pallas_kernels.kda.blocks import backward_flops, forward_flops
from pallas_kernels.kda.dplr import chunk_dplr_as_kda

GATE_LOWER_BOUND = -5.0  # of K3


@dataclass(frozen=True)
class Case:
    """Sizes of one benchmark. `segments` are the lengths of packed sequences that fill the one row (B = 1), if any.

    With `raw_gate` g are the gate's logits, in `dtype`, as a layer has them.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    dtype: str
    segments: tuple[int, ...] = ()
    raw_gate: bool = False

    def __post_init__(self):
        if min(self.B, self.T, self.H, self.K, self.V) < 1:
            raise ValueError(f"shape = {self.B},{self.T},{self.H},{self.K},{self.V}: expected positive sizes")
        if self.segments and (self.B != 1 or sum(self.segments) != self.T or min(self.segments) < 0):
            raise ValueError(
                f"segments = {self.segments}: expected lengths that add up to T = {self.T} with B = 1, as B is {self.B}"
            )

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.sizes.values()))
        packed = f" packed {','.join(map(str, self.segments))}" if self.segments else ""
        return f"{sizes} {self.dtype}{packed}{' from raw gates' if self.raw_gate else ''}"

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("B", "T", "H", "K", "V")}

    @property
    def token_heads(self) -> int:
        return self.B * self.T * self.H

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arguments as a projection makes them: heads side by side. An activated gate is float32."""
        B, T, H = self.B, self.T, self.H
        made = {"q": (H * self.K,), "k": (H * self.K,), "v": (H * self.V,), "g": (H * self.K,), "beta": (H,)}
        dtypes = dict.fromkeys(made, jnp.dtype(self.dtype))
        dtypes |= {} if self.raw_gate else {"g": jnp.dtype("float32")}
        return {name: jax.ShapeDtypeStruct((B, T, *shape), dtypes[name]) for name, shape in made.items()}


def make_inputs(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Random arguments: unit queries and keys, a gate in (-1, 0), and "do", the cotangent of the output.

    The gradient of flash-linear-attention's chunked reference is NaN where the gate sums to less than -88 in a chunk.
    """
    random = np.random.default_rng(seed)
    shapes = case.shapes() | {"do": case.shapes()["v"]}
    made = {name: random.standard_normal(x.shape) for name, x in shapes.items()}
    for name in ("q", "k"):
        heads = made[name].reshape(case.B, case.T, case.H, case.K)
        made[name] = (heads / np.linalg.norm(heads, axis=-1, keepdims=True)).reshape(made[name].shape)
    made["g"] = -random.random(made["g"].shape)
    made["beta"] = random.random(made["beta"].shape)
    return {name: x.astype(shapes[name].dtype) for name, x in made.items()}


Baseline = Literal["dplr"]


def forward(case: Case, implementation: Implementation | Baseline) -> Callable[..., tuple[Array, Array]]:
    """A function of q, k, v, g, beta (flat) -> output [B, T, H V], final state."""
    offsets = np.concatenate([[0], np.cumsum(case.segments)]).astype(np.int32) if case.segments else None

    def run(
        q: Float[Array, "B T HK"],
        k: Float[Array, "B T HK"],
        v: Float[Array, "B T HV"],
        g: Float[Array, "B T HK"],
        beta: Float[Array, "B T H"],
    ) -> tuple[Float[Array, "B T HV"], Float[Array, "S H K V"]]:
        q, k, v, g = (x.reshape(*x.shape[:2], case.H, -1) for x in (q, k, v, g))
        if implementation == "dplr":
            o, state = chunk_dplr_as_kda(q, k, v, g, beta, gate_lower_bound=GATE_LOWER_BOUND)
            return o.reshape(*o.shape[:2], -1), state
        op, gate = chunk_kda, ()
        if case.raw_gate:
            op, gate = kda_from_raw_gate, (jnp.zeros(case.H), jnp.zeros((case.H, case.K)))
        o, state = op(
            q, k, v, g, beta, *gate, gate_lower_bound=GATE_LOWER_BOUND, implementation=implementation,
            segment_offsets=None if offsets is None else jnp.asarray(offsets),
        )  # fmt: skip
        return o.reshape(*o.shape[:2], -1), state

    return run


def forward_backward(
    case: Case, implementation: Implementation | Baseline
) -> Callable[..., tuple[Array, tuple[Array, ...]]]:
    """A function of q, k, v, g, beta, do (flat) -> output, the gradients of <output, do> for the first five."""
    run = forward(case, implementation)

    def step(q, k, v, g, beta, do):
        o, pullback = jax.vjp(lambda *arguments: run(*arguments)[0], q, k, v, g, beta)
        return o, pullback(do)

    return step


def lower(
    topology: str,
    shape: Sequence[int],
    dtype: str,
    segments: Sequence[int],
    implementation: str,
    backward: bool,
    raw_gate: bool = False,
) -> jax.stages.Lowered:
    """The forward (or forward and backward) program for one device of a TPU topology. `shape` is B, T, H, K, V."""
    case = Case(*shape, dtype=dtype, segments=tuple(segments), raw_gate=raw_gate)
    mesh = aot.mesh_for(topology, device=1)
    shapes = case.shapes() | ({"do": case.shapes()["v"]} if backward else {})
    function = (forward_backward if backward else forward)(case, implementation)
    return aot.lower_for(function, *(aot.abstract(x.shape, x.dtype, mesh) for x in shapes.values()), mesh=mesh)


def compulsory_bytes(case: Case, backward: bool) -> int:
    """Bytes that must cross HBM: every argument and result once."""
    size = {name: math.prod(x.shape) * x.dtype.itemsize for name, x in case.shapes().items()}
    once = sum(size.values()) + size["v"]  # and the output
    return once + (sum(size.values()) + size["v"] if backward else 0)  # the gradients, and the output's cotangent


def operations(case: Case, backward: bool) -> int:
    """Multiplications and additions of the matrix products."""
    per_token_head = forward_flops(case.K, case.V) + (backward_flops(case.K, case.V) if backward else 0)
    return case.token_heads * per_token_head
