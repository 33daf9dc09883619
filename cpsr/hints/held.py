"""What many objects hold, compared at every checkpoint: by identity, without a line of Python for most of them."""

import types
from collections import deque
from collections.abc import Collection, Mapping
from itertools import chain
from operator import attrgetter, is_
from types import CellType, FunctionType
from typing import Any

__all__ = ["Held", "slots_of"]

_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_OF_CELL = attrgetter("cell_contents")


class Held:
    """Objects, and what they held when `remember` was called."""

    def __init__(self) -> None:
        self._collections: list[Collection[Any]] = []
        self._mappings: list[Mapping[Any, Any]] = []
        self._full: list[Mapping[Any, Any]] = []
        self._empty: list[Mapping[Any, Any]] = []
        self._functions: list[FunctionType] = []
        self._cells: list[CellType] = []
        self._others: list[Any] = []
        self._before: tuple[list[int], list[Any]] = ([], [])

    def add(self, value: Any) -> None:
        """Watch an object."""
        if isinstance(value, list | deque | set):
            self._collections.append(value)
        elif isinstance(value, dict | types.MappingProxyType):
            self._mappings.append(value)
        elif isinstance(value, FunctionType):
            self._functions.append(value)
            self._mappings += [value.__kwdefaults__] if value.__kwdefaults__ else []
            self._cells += value.__closure__ or ()
        elif isinstance(value, type):
            self._mappings.append(vars(value))
        elif not isinstance(value, tuple | frozenset):  # what these hold was added itself
            self._others.append(value)

    def remember(self) -> None:
        """Take what they hold now as what they held."""
        self._full = [one for one in self._mappings if one]
        self._empty = [one for one in self._mappings if not one]
        self._before = self._now()

    def is_unchanged(self) -> bool:
        """Whether each holds the very objects that it held; if not they may still be equal."""
        if any(self._empty):
            return False
        (sizes, objects), (sizes_before, objects_before) = self._now(), self._before
        return sizes == sizes_before and all(map(is_, objects, objects_before))

    def _now(self) -> tuple[list[int], list[Any]]:
        others = [_parts(one) for one in self._others]
        sizes = [*map(len, self._collections), *map(len, self._full), *map(len, others)]
        objects = [
            *chain.from_iterable(self._collections),
            *chain.from_iterable(self._full),
            *chain.from_iterable(one.values() for one in self._full),
            *chain.from_iterable(map(_OF_FUNCTION, self._functions)),
            *map(_OF_CELL, self._cells),
            *chain.from_iterable(others),
        ]
        return sizes, objects


def slots_of(kind: type) -> list[str]:
    """Names of the slots of a class and its bases."""
    found = [getattr(one, "__slots__", ()) for one in kind.__mro__]
    return [key for one in found for key in ((one,) if isinstance(one, str) else tuple(one))]


def _parts(value: Any) -> list[Any]:
    state = getattr(value, "__dict__", {})
    return [*(getattr(value, key, None) for key in slots_of(type(value))), *state, *state.values()]
