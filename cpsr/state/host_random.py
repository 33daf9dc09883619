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
Look = Callable[[], object]


def _memory(address: int, size: int) -> Any:
    """Whose `raw` are these bytes as they are then."""
    return (ctypes.c_char * size).from_address(address)


def _own_memory(one: Any) -> Any:
    return _memory(id(one) + _HEAD, type(one).__basicsize__ - _HEAD)


def _look_at_python(one: Any) -> Look:
    own = _own_memory(one)
    return lambda: (own.raw, one.gauss_next)


def _look_at_numpy(one: numpy.random.RandomState) -> Look:
    """Also at the object itself, where NumPy keeps every second normal number; None: of another algorithm."""
    own, words, generator = _own_memory(one), None, None

    def look() -> object:
        nonlocal words, generator
        if generator is not one._bit_generator:
            generator = one._bit_generator
            known = type(generator) is numpy.random.MT19937
            words = _memory(generator.ctypes.state_address, _MT19937_BYTES) if known else None
        return None if words is None else (own.raw, words.raw)

    return look


class _Kept(Generic[Generator]):
    """The state of one generator, as it was last read.

    Args:
        generator: whose state it is.
        read: returns the state, which callers must not change.
        look_at: gives what looks at the memory of a generator.
        draws: of another such generator; each changes its memory, or the memory is not looked at.

    Attributes:
        state: as it was last read.
        seen: the memory then; None: it is to be read again.
        look: at the memory now; None: it does not show the state.
    """

    def __init__(
        self,
        generator: Generator,
        read: Callable[[], Any],
        look_at: Callable[[Generator], Look],
        draws: tuple[Generator, list[Callable[[], object]]],
    ) -> None:
        self._read = read
        self.look: Look = lambda: None
        self.seen: object = None
        self.state: Any = None
        if _HEAD > 0 and _shows_each(look_at(draws[0]), draws[1]):
            self.look = look_at(generator)

    def read(self, seen: object) -> Any:
        """The state now, read from the generator, whose memory looked like this."""
        self.state = self._read()
        # Another thread may have drawn in between.
        self.seen = seen if seen is not None and seen == self.look() else None
        return self.state


def _shows_each(look: Look, draws: list[Callable[[], object]]) -> bool:
    seen = [look()]
    for draw in draws:
        draw()
        seen.append(look())
    return None not in seen and all(one != following for one, following in pairwise(seen))


def _kept_python() -> _Kept[random.Random]:
    other = random.Random(0)  # noqa: S311
    normal = lambda: other.gauss(0.0, 1.0)  # noqa: E731
    shared: Any = random.getstate
    return _Kept(shared.__self__, random.getstate, _look_at_python, (other, [other.random, normal, normal]))


def _kept_numpy() -> _Kept[numpy.random.RandomState]:
    other = numpy.random.RandomState(0)
    draws: list[Callable[[], object]] = [other.random_sample, other.standard_normal, other.standard_normal]
    shared: Any = numpy.random.get_state
    return _Kept(shared.__self__, numpy.random.get_state, _look_at_numpy, (other, draws))


_KEPT: dict[str, _Kept[Any]] = {"python": _kept_python(), "numpy": _kept_numpy()}


def capture_host_rng() -> dict[str, Any]:
    """Random states of Python, NumPy's global generator and torch on the CPU: plain data, not to be changed."""
    states = {}
    for name, kept in _KEPT.items():
        seen = kept.look()
        states[name] = kept.state if seen is not None and seen == kept.seen else kept.read(seen)
    return {**states, "torch": torch.default_generator.get_state()}


def restore_host_rng(state: dict[str, Any]) -> None:
    """Restore what `capture_host_rng` returned."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
