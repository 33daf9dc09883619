"""Functions that go on after a kill from one of their hints, and the placement of checkpoints among hints."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpsr.hints.function import resumable
    from cpsr.hints.source import hint

__all__ = ["hint", "resumable"]

_LAZY = {"hint": "cpsr.hints.source", "resumable": "cpsr.hints.function"}  # `cpsr plan --hints` needs no torch


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'cpsr.hints' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
