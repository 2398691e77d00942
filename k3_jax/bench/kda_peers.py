"""Other people's implementations of Kimi Delta Attention for a CPU, where they are installed: torch references.

They are correctness peers. The kernels of flash-linear-attention need a GPU; its `naive` functions and the fallback of
transformers are what runs here.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable

import numpy as np

from k3_jax.bench.measure import Contestant
from pallas_kernels.kda.bench import Case

FLA, TRANSFORMERS = "fla.ops.kda.naive", "transformers.models.kimi_linear.modeling_kimi_linear"
CHUNK = 64  # fla's chunked form takes whole chunks only


def peers(case: Case, inputs: dict[str, np.ndarray], backward: bool) -> list[Contestant]:
    """Those installed. `inputs` are as of `pallas_kernels.kda.bench.make_inputs`."""
    found = {
        "fla naive chunk": _function(FLA, "naive_chunk_kda"),
        "fla naive recurrent": _function(FLA, "naive_recurrent_kda"),
        "transformers chunk": _function(TRANSFORMERS, "chunk_kimi_delta_attention"),
    }
    return [_contestant(name, op, case, inputs, backward) for name, op in found.items() if op]


def _function(module: str, name: str) -> Callable | None:
    """A torch function; without its decorator, which would choose a GPU kernel. None where it is not installed."""
    if not all(importlib.util.find_spec(package) for package in ("torch", module.partition(".")[0])):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    return getattr(function, "__wrapped__", function)


def _contestant(name: str, op: Callable, case: Case, inputs: dict[str, np.ndarray], backward: bool) -> Contestant:
    import torch

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x.astype(np.float32)).to(getattr(torch, x.dtype.name))

    tensors = {key: tensor(x) for key, x in inputs.items()}
    do = tensors.pop("do")

    def run() -> dict[str, torch.Tensor]:
        leaves = {key: x.detach().requires_grad_(backward) for key, x in tensors.items()}
        with torch.set_grad_enabled(backward):
            o = _by_segment(op, case, **leaves)
        if backward:
            o.backward(do)
        return {"o": o.detach()} | {key: x.grad for key, x in leaves.items() if backward}

    return Contestant(name, run, lambda found: {key: x.float().numpy() for key, x in found.items()})


def _by_segment(op: Callable, case: Case, q, k, v, g, beta):
    """[B, T, H V] of flat arguments: a call per packed sequence, filled to whole chunks by tokens that do nothing."""
    import torch
    import torch.nn.functional as F

    arguments = [x.unflatten(-1, (case.H, -1)) for x in (q, k, v, g)] + [beta]
    outputs, start = [], 0
    for length in filter(None, case.segments or (case.T,)):
        pieces = (x[:, start : start + length] for x in arguments)
        padded = (F.pad(x, (0, 0) * (x.ndim - 2) + (0, -length % CHUNK)) for x in pieces)
        outputs.append(op(*padded, initial_state=None, output_final_state=False)[0][:, :length])
        start += length
    return torch.cat(outputs, dim=1).flatten(2)
