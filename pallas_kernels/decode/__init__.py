"""One decode step of a K3-family model as one Pallas kernel over all layers, on every core of a TPU slice.

config.py     what the kernel is compiled for          tape.py, record.py   how weights stand in HBM
plan.py       exchanges, arrays, buffers, as data      ledger.py            their bytes
protocol.py   static check of the exchanges            pack.py, caches.py   from and to a model's arrays
reference.py  the same step in plain JAX               sections.py          packing, one piece after the other
timeline.py   a model of its time                      stages.py            the step's instructions for it
compiled.py   bundles of the stages                    published.py         the published kernel under the same model
predicted.py  tokens per second                        bench.py, api.py     its bench; programs of steps
slots.py      rows of one sequence, snapshots
step.py       the kernel; its parts by role: core, ring, collectives, attn_res, kda, mla, channels, router, experts,
              head
"""

from pallas_kernels.decode.api import abstract_arguments, decode_program, verify_program
from pallas_kernels.decode.call import AXIS
from pallas_kernels.decode.config import (
    LANES,
    Blocks,
    DecodeConfig,
    DecodeConfigError,
    KDAShape,
    LayerKind,
    MLAShape,
    MoEShape,
    Widths,
    round_up,
)
from pallas_kernels.decode.pack import ExpertCodes, Packer, PackError
from pallas_kernels.decode.plan import Plan
from pallas_kernels.decode.sections import LAYOUT_VERSION, Section, Tensors, nbytes, sections_of
from pallas_kernels.decode.slots import Slots, Snapshots, independent, together
from pallas_kernels.decode.step import decode_step

__all__ = [
    "AXIS",
    "Blocks",
    "DecodeConfig",
    "DecodeConfigError",
    "ExpertCodes",
    "KDAShape",
    "LANES",
    "LAYOUT_VERSION",
    "LayerKind",
    "MLAShape",
    "MoEShape",
    "PackError",
    "Packer",
    "Plan",
    "Section",
    "Slots",
    "Snapshots",
    "Tensors",
    "Widths",
    "abstract_arguments",
    "decode_program",
    "decode_step",
    "independent",
    "nbytes",
    "round_up",
    "sections_of",
    "together",
    "verify_program",
]
