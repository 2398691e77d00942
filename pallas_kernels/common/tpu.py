"""Facts about TPU chips, passed as explicit arguments so that kernels and plans can be made where there is no TPU.

The numbers are those of `pltpu.get_tpu_info_for_chip` in JAX 0.12.0.1 (a test compares them), those of the links
from Google's pages on the generations. JAX states them per TensorCore, this table per JAX device: v6e has one core per
chip, v5p fuses its two into one device, each of TPU7x's two is a device.
"""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Chip:
    """One JAX device of a TPU generation: sizes in bytes, bandwidth and arithmetic per second, as the vendor's peaks.

    `fp8_flops` is None where the matrix unit has no FP8. `ici_bandwidth` is what a device sends over all its links at
    once (half a chip's for TPU7x), `program_hbm_bytes` what libtpu 0.0.50 leaves to a program, as its error says.
    `topology` is the prefix of topology names, as in "v6e:2x4".
    """

    name: str
    topology: str
    device_kind: str
    cores: int
    vmem_bytes_per_core: int
    smem_bytes_per_core: int
    mxu_size: int
    mxus_per_core: int
    hbm_bytes: float
    hbm_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    devices_per_chip: int
    ici_bandwidth: float
    program_hbm_bytes: float

    @property
    def ridge(self) -> float:
        """bf16 operations per HBM byte above which a program is bound by arithmetic."""
        return self.bf16_flops / self.hbm_bandwidth


V5P = Chip(
    name="v5p",
    topology="v5p",
    device_kind="TPU v5",
    cores=2,
    vmem_bytes_per_core=64 * MIB,
    smem_bytes_per_core=MIB,
    mxu_size=128,
    mxus_per_core=4,
    hbm_bytes=103e9,
    hbm_bandwidth=2.46e12,
    bf16_flops=459e12,
    fp8_flops=None,
    devices_per_chip=1,
    ici_bandwidth=600e9,
    program_hbm_bytes=95.73 * 2**30,
)
V6E = Chip(
    name="v6e",
    topology="v6e",
    device_kind="TPU v6 lite",
    cores=1,
    vmem_bytes_per_core=128 * MIB,
    smem_bytes_per_core=MIB,
    mxu_size=256,
    mxus_per_core=2,
    hbm_bytes=34.4e9,
    hbm_bandwidth=1.64e12,
    bf16_flops=920e12,
    fp8_flops=920e12,
    devices_per_chip=1,
    ici_bandwidth=400e9,
    program_hbm_bytes=31.24 * 2**30,
)
TPU7X = Chip(
    name="tpu7x",
    topology="tpu7x",
    device_kind="TPU7x",
    cores=1,
    vmem_bytes_per_core=64 * MIB,
    smem_bytes_per_core=MIB,
    mxu_size=256,
    mxus_per_core=2,
    hbm_bytes=103e9,
    hbm_bandwidth=3.7e12,
    bf16_flops=1155e12,
    fp8_flops=2300e12,
    devices_per_chip=2,
    ici_bandwidth=300e9,
    program_hbm_bytes=94.74 * 2**30,
)
CHIPS = (V5P, V6E, TPU7X)


def chip(name: str) -> Chip:
    """The facts of a chip by name ("v6e"), topology name ("v6e:2x4") or device kind ("TPU v6 lite").

    Raises ValueError for any other chip: there is no default.
    """
    for candidate in CHIPS:
        if name == candidate.device_kind or name.partition(":")[0].lower() == candidate.topology:
            return candidate
    raise ValueError(f"chip = {name!r}: expected one of {', '.join(c.name for c in CHIPS)}")
