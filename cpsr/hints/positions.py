"""Iterators that say where they are, and can be made again to begin there."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy
import torch

__all__ = ["MAKERS", "Positions", "is_iterator", "one_way", "positions_of"]

MAKERS: dict[str, Callable[..., Any]] = {"iter": iter, "reversed": reversed, "enumerate": enumerate, "zip": zip}
_SEQUENCES = (list, tuple, range, str, bytes, numpy.ndarray)
_EXAMPLES: tuple[Any, ...] = ([], (), range(0), range(1 << 99), "", "\u00e9", b"", numpy.zeros(1))
# Python's own say where they are by `__reduce__`: what makes one, from which arguments, and the position.
_ITERATORS = frozenset(
    [
        *(type(iter(one)) for one in _EXAMPLES),
        *(type(reversed(one)) for one in _EXAMPLES[:4]),
        enumerate,
        zip,
    ]
)


class Positions:
    """Goes over a mapping, one of its views, or a tensor, as `iter` does, and counts.

    Args:
        source: the mapping or the tensor.
        view: `keys`, `values` or `items`; empty: the source itself.
        position: items that were taken before.
    """

    def __init__(self, source: Any, view: str, position: int = 0) -> None:
        self.source, self.view, self.position = source, view, position
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> "Positions":
        return self

    def __next__(self) -> Any:
        if self._items is None:
            whole = iter(getattr(self.source, self.view)() if self.view else self.source)
            self._items = islice(whole, self.position, None)
        item = next(self._items)
        self.position += 1
        return item

    def __length_hint__(self) -> int:
        return max(0, len(self.source) - self.position)


def positions_of(value: Any, view: str) -> Any:
    """What a loop goes over: `Positions` of mappings and tensors, else the value, or its view, itself."""
    if type(value) in (dict, OrderedDict) or (not view and isinstance(value, torch.Tensor) and value.dim()):
        return Positions(value, view)
    return getattr(value, view)() if view else value


def is_iterator(value: Any) -> bool:
    """Whether it is an iterator of these."""
    return type(value) in _ITERATORS or type(value) is Positions


def one_way(value: Any) -> Any:
    """What of an iterable cannot be begun in the middle; None if all can."""
    if type(value) in _SEQUENCES or type(value) is Positions:
        return None
    if type(value) not in _ITERATORS:
        return value
    maker, arguments, *_ = value.__reduce__()
    inner = arguments[:1] if maker is enumerate else arguments
    return next((found for one in inner if (found := one_way(one)) is not None), None)
