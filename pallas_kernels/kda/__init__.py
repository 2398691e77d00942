"""Kimi Delta Attention: chunkwise training and prefill, recurrent decode, context-parallel composition, the gate."""

from pallas_kernels.kda.api import chunk_kda, kda_combine, kda_from_raw_gate, recurrent_kda
from pallas_kernels.kda.gate import kda_gate

__all__ = ["chunk_kda", "kda_combine", "kda_from_raw_gate", "kda_gate", "recurrent_kda"]
