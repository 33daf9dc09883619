"""Random states of the host: Python's, NumPy's global generator and torch's on the CPU.

They are captured before every batch. Python takes 9 microseconds to return its state and NumPy 35, three times as long
while a training step fills the processor's cache. So a state is read again only where the memory of its generator has
changed.
"""

import ctypes
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy
import torch

__all__ = ["capture_host_rng", "restore_host_rng"]

_HEAD = 16 if sys.implementation.name == "cpython" else 0  # reference count and type; 0: memory cannot be looked at
_MT19937_BYTES = 624 * 4 + 4  # the words, and the position in them
Generator = TypeVar("Generator")


def _memory(one: Any) -> bytes:
    return ctypes.string_at(id(one) + _HEAD, type(one).__basicsize__ - _HEAD)


def _python_memory(one: Any) -> object:
    return _memory(one), one.gauss_next


def _numpy_memory(one: numpy.random.RandomState) -> object:
    """Also that of the object itself, where NumPy keeps every second normal number; None: of another algorithm."""
    generator: Any = one._bit_generator
    if type(generator) is not numpy.random.MT19937:
        return None
    return _memory(one), ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


class _Kept(Generic[Generator]):
    """The state of one generator, as it was last read.

    Args:
        generator: whose state it is.
        read: returns the state, which callers must not change.
        look: at the memory of a generator.
        draws: of another such generator; each changes its memory, or the memory is not looked at.
    """

    def __init__(
        self,
        generator: Generator,
        read: Callable[[], Any],
        look: Callable[[Generator], object],
        draws: tuple[Generator, list[Callable[[], object]]],
    ) -> None:
        self._generator, self._read, self._look = generator, read, look
        self._seen: object = None
        self._state: Any = None
        self._shows = _HEAD > 0 and self._shows_each(*draws)

    def _shows_each(self, other: Generator, draws: list[Callable[[], object]]) -> bool:
        seen = [self._look(other)]
        for draw in draws:
            draw()
            seen.append(self._look(other))
        return None not in seen and all(one != following for one, following in pairwise(seen))

    def get(self) -> Any:
        """The state now."""
        seen = self._look(self._generator) if self._shows else None
        if seen is None or seen != self._seen:
            self._state = self._read()
            # Another thread may have drawn in between.
            self._seen = seen if seen is not None and seen == self._look(self._generator) else None
        return self._state


def _kept_python() -> _Kept[random.Random]:
    other = random.Random(0)  # noqa: S311
    normal = lambda: other.gauss(0.0, 1.0)  # noqa: E731
    shared: Any = random.getstate
    return _Kept(shared.__self__, random.getstate, _python_memory, (other, [other.random, normal, normal]))


def _kept_numpy() -> _Kept[numpy.random.RandomState]:
    other = numpy.random.RandomState(0)
    draws: list[Callable[[], object]] = [other.random_sample, other.standard_normal, other.standard_normal]
    shared: Any = numpy.random.get_state
    return _Kept(shared.__self__, numpy.random.get_state, _numpy_memory, (other, draws))


_python, _numpy = _kept_python(), _kept_numpy()


def capture_host_rng() -> dict[str, Any]:
    """Random states of Python, NumPy's global generator and torch on the CPU: plain data, not to be changed."""
    return {"python": _python.get(), "numpy": _numpy.get(), "torch": torch.get_rng_state()}


def restore_host_rng(state: dict[str, Any]) -> None:
    """Restore what `capture_host_rng` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
