"""Functions that go on after a kill from one of their hints, and the placement of checkpoints among hints."""

from cpsr.hints.function import resumable
from cpsr.hints.source import hint

__all__ = ["hint", "resumable"]
