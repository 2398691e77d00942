"""Other kernels for grouped products: which are compared for which product, and tokamax's, where it is installed.

Only kernels whose steps do not depend on the groups' sizes are here: a schedule cannot know those.
"""

import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.grouped.bench import LOWER, Product, lower_op

PEERS = {"matmul": ("xla", "megablox", "tokamax"), "transposed": ("xla", "megablox", "tokamax"), "outer": ("xla",)}


def entrants(product: Product) -> dict[str, str]:
    """Ours and the peers, with what lowers them."""
    peers = [name for name in PEERS[product] if name != "tokamax" or importlib.util.find_spec(name)]
    return {name: f"{__name__}:lower_tokamax" if name == "tokamax" else LOWER for name in ("pallas", *peers)}


def lower_tokamax(topology: str, shape: Sequence[int], product: Product, competitor: str) -> jax.stages.Lowered:
    from tokamax import config
    from tokamax._src.ops.ragged_dot import api, base

    numbers = {"matmul": base.DEFAULT_RAGGED_DOT_DIM_NUMS, "transposed": base.TRANS_RHS_RAGGED_DOT_DIM_NUMS}[product]

    def op(x, w, sizes):
        with config.cross_compile(True):
            return api.ragged_dot_general(
                x, w, sizes, ragged_dot_dimension_numbers=numbers, preferred_element_type=jnp.float32,
                implementation="mosaic",
            )  # fmt: skip

    return lower_op(op, topology, shape, product)
