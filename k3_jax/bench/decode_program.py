"""What `k3 bench decode` compiles."""

import jax
import numpy as np
from jax.sharding import Mesh

from k3_jax.config import K3Config
from k3_jax.recipe import load_recipe
from k3_jax.serve.packed import Cut
from pallas_kernels.common import aot
from pallas_kernels.decode import AXIS, Plan, abstract_arguments, decode_program

STEPS = 16


def plan_of(model: K3Config, ranks: int, rows: int, context: int) -> Plan:
    """For so many tokens in every row."""
    return Cut(model, ranks, "bfloat16").plan(rows, context + STEPS)


def lower(config: str, topology: str, rows: int, context: int) -> jax.stages.Lowered:
    mesh = Mesh(np.array(aot.topology(topology).devices), (AXIS,))
    plan = plan_of(load_recipe(config).model, mesh.size, rows, context)
    return aot.lower_for(decode_program(plan, mesh, STEPS), *abstract_arguments(plan, mesh), mesh=mesh)
