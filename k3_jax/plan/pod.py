"""A TPU topology by its name, without the TPU compiler: how many devices, of which chip, in which mesh."""

import math
import re
from dataclasses import dataclass

from jax.sharding import AbstractMesh, AxisType

from k3_jax.config import ConfigError, MeshConfig
from k3_jax.mesh import AXES, axis_sizes
from pallas_kernels.common.tpu import Chip, chip


@dataclass(frozen=True)
class Pod:
    topology: str
    chip: Chip
    chips: int

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices_per_chip

    def mesh(self, config: MeshConfig) -> AbstractMesh:
        """The mesh of a run on all devices. Raises ConfigError as `make_mesh` does."""
        return AbstractMesh(axis_sizes(config, self.devices), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def pod(topology: str) -> Pod:
    """Raises ConfigError for a name that is not like "tpu7x:8x8x8"."""
    name, _, sizes = topology.partition(":")
    try:
        found = chip(name)
    except ValueError as error:
        raise ConfigError(f"--topology = {topology}: {error}") from error
    if not re.fullmatch(r"\d+(x\d+){1,2}", sizes):
        raise ConfigError(f"--topology = {topology}: expected chips after a colon, such as {name}:8x8x8")
    return Pod(topology, found, math.prod(map(int, sizes.split("x"))))
