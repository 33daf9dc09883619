"""Iterators that say where they are, and can be made again to begin there."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy
import torch

from cpsr.errors import NotResumableError
from cpsr.hints.memory import UnsavableError

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
_OTHER_MEMORY = (
    "the tensor was given other memory, or another shape or type, since the loop began, which goes on over what was "
    "there. Go over list(...) of it"
)


class Positions:
    """Goes over a mapping, one of its views, or a tensor, as `iter` does, and says where it is.

    Args:
        source: the mapping or the tensor.
        view: `keys`, `values` or `items`; empty: the source itself.
    """

    def __init__(self, source: Any, view: str) -> None:
        self.source, self.view = source, view
        self._position = 0
        self._begun = _layout(source)
        self._restored = False
        self._items: Iterator[Any] | None = None

    def __iter__(self) -> "Positions":
        if self._items is None and not self._restored:
            self._begun, self._items = _layout(self.source), self._whole()
        return self

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._continued()
        item = next(self._items)
        self._position += 1
        return item

    def __length_hint__(self) -> int:
        return max(0, len(self.source) - self._position)

    def state(self) -> list[int]:
        """Items taken, and items in all when the loop began; -1: the next item is an error, whatever comes.

        Raises:
            UnsavableError: a loop over the source as it is now would go on otherwise.
        """
        length, (size, *_) = len(self.source), self._begun
        if isinstance(self.source, torch.Tensor) and _layout(self.source) != self._begun:
            raise UnsavableError(_OTHER_MEMORY)
        if isinstance(self.source, torch.Tensor) or self._items is None:
            return [self._position, size]
        try:
            left = len(self._items.__reduce__()[1][0])
        except RuntimeError:  # as the next item will be: always, or while the length is another
            if type(self.source) is OrderedDict or length != size:
                return [self._position, -1 if type(self.source) is OrderedDict else size]
            left = -1
        if type(self.source) is dict and left != length - self._position:
            raise UnsavableError(
                "the mapping has lost keys that the loop has taken, and has others for them: Python may then miss "
                "items. Go over list(...) of it"
            )
        return [length - left, length]

    def __setstate__(self, state: list[int]) -> None:
        """Go on from there, in a source that is as it was then."""
        self._position, size = state
        layout = _layout(self.source)
        self._begun, self._items, self._restored = (size, *layout[1:]), None, True
        if isinstance(self.source, dict) and size == len(self.source):
            self._items = self._skipped()

    def _whole(self) -> Iterator[Any]:
        return iter(getattr(self.source, self.view)() if self.view else self.source)

    def _skipped(self) -> Iterator[Any]:
        items = self._whole()
        for _ in islice(items, self._position):
            pass
        return items

    def _continued(self) -> Iterator[Any]:
        """After a restart: tensors only now, where gradients are on or off as they were; mappings that had changed."""
        if isinstance(self.source, torch.Tensor):
            if _layout(self.source) != self._begun:
                raise NotResumableError(f"the loop cannot go on after a restart: {_OTHER_MEMORY}")
            return self._skipped()
        if type(self.source) is OrderedDict:
            raise RuntimeError("OrderedDict mutated during iteration")
        if len(self.source) != self._begun[0]:
            raise RuntimeError("dictionary changed size during iteration")
        raise NotResumableError(
            "the loop cannot go on after a restart: its mapping had more or fewer items at the hint, and has as many "
            "items again as before. The checkpoint was kept. Go over list(...) of the mapping, and begin anew"
        )


def _layout(source: Any) -> tuple[Any, ...]:
    """What tells that an iterator that was made before goes over something else."""
    if isinstance(source, torch.Tensor):
        return (len(source), source.data_ptr(), source.shape, source.stride(), source.dtype)
    return (len(source),)


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
