"""Between which two times a step lies, at the chip's peaks and the links' bandwidths, and what they mean as an MFU.

Nothing here is calibrated: the peaks are the vendor's, and all that is neither product nor transfer is left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from k3_jax.plan.flows import Flow
from k3_jax.plan.pod import Pod
from k3_jax.plan.work import Work

UNCALIBRATED = "predicted, uncalibrated"


@dataclass(frozen=True)
class Bracket:
    """Seconds of a device's work and of its transfers in a step, by how much of the two overlaps. `bubble` is the share
    of the step that it waits for other ranks of a pipeline."""

    compute: float
    transfer: float
    bubble: float = 0.0

    def seconds(self) -> dict[str, float]:
        found = {"no overlap": self.compute + self.transfer, "full overlap": max(self.compute, self.transfer)}
        return {name: seconds / (1 - self.bubble) for name, seconds in found.items()}


def transfer_seconds(flows: Iterable[Flow], pod: Pod, mesh: Mapping[str, int]) -> float:
    """One after the other."""
    return sum(flow.seconds(pod.chip, mesh) for flow in flows)


def utilisation(work: Work, pod: Pod, seconds: float) -> float:
    """MFU of a step that takes so long."""
    return work.model / pod.devices / pod.chip.bf16_flops / seconds
