"""Sparse snapshots of a mixture of experts: what there is to save, what is saved when, and what failures take."""

from cpsr.experts.window import SparseWindow, sparse_window

__all__ = ["SparseWindow", "sparse_window"]
