"""Where a kernel runs: which platform, and over which mesh axes its operands differ."""

import jax
from jaxtyping import Array


def on_tpu() -> bool:
    """Whether the mesh in use, or else the default backend, is of TPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    return (jax.default_backend() if mesh.empty else mesh.abstract_device.platform) == "tpu"


def device_kind() -> str:
    """Of the mesh in use, or else of the default backend."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.devices()[0].device_kind if mesh.empty else mesh.abstract_device.device_kind


def vary_alike(*arrays: Array, like: tuple[Array, ...] = ()) -> tuple[Array, ...]:
    """`arrays` marked as varying over every manual mesh axis over which any of them or of `like` varies.

    Inside jax.shard_map a scan's carry must enter with the type with which it leaves, and a custom gradient differs on
    every shard on which one of its operands does: undoing the mark sums it. Elsewhere this does nothing.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in (*arrays, *like)))
    missing = [tuple(axes - jax.typeof(x).manual_axis_type.varying) for x in arrays]
    return tuple(jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True))
