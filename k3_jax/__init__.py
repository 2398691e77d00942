"""Kimi K3 in JAX/Flax for TPU pods."""

import glob
import os
from typing import TYPE_CHECKING

from k3_jax.config import K3Config

# Device files of TPU VMs (two generations of the driver) and of NVIDIA GPUs. Where there are none, libtpu is there to
# compile only, and JAX, if it is not imported yet, should not spend seconds and warnings on looking for a TPU.
if not any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

if TYPE_CHECKING:
    from k3_jax.nn.transformer import K3

__all__ = ["K3", "K3Config"]


def __getattr__(name: str):
    """`K3` on first use: `k3 --help` must not wait seconds for JAX and Flax."""
    if name == "K3":
        from k3_jax.nn.transformer import K3

        return K3
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
