"""Sparse snapshots of a mixture of experts: which experts to save when, and how many tokens failures lose."""

from cpsr.experts.window import SparseWindow, sparse_window

__all__ = ["SparseWindow", "sparse_window"]
