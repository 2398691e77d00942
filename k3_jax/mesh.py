"""Meshes: the axis names, and the only place that makes a mesh of devices.

All meshes are Explicit: a value's type carries its sharding, so a wrong layout is an error while tracing.
"""

import math

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from k3_jax.config import ConfigError, MeshConfig

AXES = ("data", "fsdp", "pipe", "expert", "context", "zigzag", "tensor")


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes of `AXES`. Devices may be those of a TPU topology (ahead of time).

    Raises ConfigError if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    # An axis may be cut out of a torus dimension: fsdp = 512 on 8 x 8 x 16 chips, say.
    shape = axis_sizes(config, len(devices))
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def axis_sizes(config: MeshConfig, devices: int) -> tuple[int, ...]:
    """The sizes of `AXES` on so many devices. Raises ConfigError if they do not multiply to them."""
    sizes = config.axes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if devices % fixed or (-1 not in sizes.values() and fixed != devices):
        shape = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "1 device"
        raise ConfigError(
            f"mesh ({shape}): expected sizes that multiply to the {devices} devices (set one axis to -1, "
            "for example --set mesh.fsdp=-1)"
        )
    return tuple(devices // fixed if sizes[name] == -1 else sizes[name] for name in AXES)
