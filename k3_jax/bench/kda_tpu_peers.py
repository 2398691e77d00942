"""Other people's Pallas kernels of Kimi Delta Attention for a TPU, where they are installed: compiled, never run.

Known: tokamax 0.0.17 (forward and backward) and mega_kda of vllm-torchtpu-core 0.29.0 (forward, L2 norm inside). Both
take bfloat16 logits of the gate, apply it inside, and return the final state.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import aot
from pallas_kernels.kda.bench import GATE_LOWER_BOUND

MEGA = "vllm_torchtpu"
TABLE = 1  # taken for every word of their scalar-prefetch operands: a whole chunk of one sequence


class Peer(NamedTuple):
    package: str
    backward: bool


PEERS = {"tokamax": Peer("tokamax", True), "mega_kda": Peer(MEGA, False)}


def installed() -> list[str]:
    return [name for name, peer in PEERS.items() if importlib.util.find_spec(peer.package)]


def lower(topology: str, shape: Sequence[int], peer: str, backward: bool) -> jax.stages.Lowered:
    """The peer's program for one device of a TPU topology, its arguments in the layout that it wants."""
    B, T, H, K, V = shape
    mesh = aot.mesh_for(topology, device=1)
    heads_first = peer == "tokamax"

    def abstract(*tail, dtype=jnp.bfloat16):
        return aot.abstract((H, B, T, *tail) if heads_first else (B, T, H, *tail), dtype, mesh)

    gate = aot.abstract((H,), jnp.float32, mesh), aot.abstract((H * K,), jnp.float32, mesh)
    arguments = abstract(K), abstract(K), abstract(V), abstract(K), abstract(), *gate
    op = _tokamax() if peer == "tokamax" else _mega_kda(B, T)
    if not backward:
        return aot.lower_for(op, *arguments, mesh=mesh)

    def step(do, *arguments):
        (o, state), pullback = jax.vjp(op, *arguments)
        return o, pullback((do, jnp.zeros_like(state)))

    return aot.lower_for(step, abstract(V), *arguments, mesh=mesh)


def _tokamax():
    from tokamax import config
    from tokamax._src.ops.kda.api import kimi_delta_attention

    def op(q, k, v, z, beta, A_log, dt_bias):
        with config.cross_compile(True):
            return kimi_delta_attention(
                q, k, v, z, beta, a_log=A_log, delta_time_bias=dt_bias, output_final_state=True,
                use_gate_in_kernel=True, lower_bound=GATE_LOWER_BOUND, implementation="mosaic",
            )  # fmt: skip

    return op


def _mega_kda(B: int, T: int):
    """Its package's __init__ files start a serving engine; the kernel needs none of it."""
    root = Path(importlib.util.find_spec(MEGA).origin).parent
    for name in (MEGA, f"{MEGA}.kernels", f"{MEGA}.kernels.kimi_k3"):
        bare = types.ModuleType(name)
        bare.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = bare
    mega_kda = importlib.import_module(f"{MEGA}.kernels.kimi_k3.mega_kda")

    def op(q, k, v, z, beta, A_log, dt_bias):
        return mega_kda.kda_forward_inference(
            q, k, v, z, beta, segment_ids=jnp.ones((B, T), jnp.int32), N_max=1, A_log=A_log, dt_bias=dt_bias,
            lower_bound=GATE_LOWER_BOUND, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
        )  # fmt: skip

    return op
