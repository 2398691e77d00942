"""What `k3 bench decode` compiles."""

import jax
import numpy as np
from jax.sharding import Mesh

from k3_jax.recipe import load_recipe
from k3_jax.serve.pack import decode_config
from pallas_kernels.common import aot
from pallas_kernels.decode import AXIS, Plan, abstract_arguments, decode_program


def lower(config: str, topology: str, rows: int, capacity: int, steps: int) -> jax.stages.Lowered:
    mesh = Mesh(np.array(aot.topology(topology).devices), (AXIS,))
    plan = Plan(decode_config(load_recipe(config).model, ranks=mesh.size, rows=rows, capacity=capacity))
    return aot.lower_for(decode_program(plan, mesh, steps), *abstract_arguments(plan, mesh), mesh=mesh)
