"""Grouped matrix products: rows sorted by group, one matrix per group."""

from pallas_kernels.grouped.api import grouped_matmul, grouped_outer, grouped_transposed, whole_lanes

__all__ = ["grouped_matmul", "grouped_outer", "grouped_transposed", "whole_lanes"]
