"""Sparse checkpoints of a mixture of experts: which experts to save when, and how many tokens failures lose."""
