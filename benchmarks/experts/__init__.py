"""Sparse snapshots of mixtures of experts: bytes, tokens at risk, stall, and what failures cost."""
