"""Verification by repetition: whether the arithmetic of this machine gives the same result twice."""
