"""A loader around a `DataLoader`: it changes the batches, as timm's `PrefetchLoader`, and may fetch some ahead.

It counts as its DataLoader, which deals the batches: a restart skips those without loading them, and gives the workers
their random states. What the loader around it draws, it draws in this process, right after a batch was fetched. So the
random states before each fetch are kept, for the batches that it has fetched and not given yet.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from torch.utils.data import DataLoader

from cpsr.errors import UnsupportedEngineError

__all__ = ["Around"]

_AHEAD_MAX = 64  # fetches that are remembered
_END = object()


class Around:
    """Lets a loader iterate over given batches in the place of those of its DataLoader.

    Args:
        loader: for which `place_inside` is not None.
        place: what that returned.
        capture: returns the random states that fetching and changing a batch draws from.
        restore: puts them back.
    """

    def __init__(self, loader: Any, place: str, capture: Callable[[], Any], restore: Callable[[Any], object]) -> None:
        self._loader, self._place = loader, place
        self._capture, self._restore = capture, restore
        # Number of the batch in its pass, the batch that was requested then, and the random states before it.
        self._fetched: deque[tuple[int, int, Any]] = deque(maxlen=_AHEAD_MAX)
        self._requested = self._thread = 0
        self._training: Any = None  # the states after those of batches that are fetched again

    def ahead(self, batch: int) -> list[Any]:
        """The random states before each fetch, of the batches that were fetched when this one of the pass was given."""
        return [states for number, requested, states in self._fetched if requested <= batch < number]

    def iterate(self, batches: Iterator[Any], skipped: int, ahead: list[Any]) -> Iterator[Any]:
        """One pass.

        Args:
            batches: of the DataLoader.
            skipped: batches of the pass that are not among them.
            ahead: what `ahead` returned for the last of those; the states of now are those after it.

        Raises:
            UnsupportedEngineError: the loader gives a batch without taking one of these.
        """
        self._fetched.clear()
        self._requested, self._thread = skipped + 1, threading.get_ident()
        own, inside = vars(self._loader), vars(self._loader)[self._place]
        given = own[self._place] = _Given(inside, self._fetching(batches, skipped, ahead))
        try:
            iterator = iter(self._loader)
            batch = next(iterator, _END)
        finally:
            own[self._place] = inside
        self._go_on()
        if batch is not _END and not given.taken:
            raise UnsupportedEngineError(
                f"this {type(self._loader).__name__} has a DataLoader in its attribute {self._place}, and gave a batch "
                "that is not from there: CPSR could not tell which data is trained. Nothing was trained. Give "
                "recovery.resume() what the batches come from"
            )
        while batch is not _END:
            yield batch
            self._requested += 1
            batch = next(iterator, _END)

    def _fetching(self, batches: Iterator[Any], skipped: int, ahead: list[Any]) -> Iterator[Any]:
        """The batches; those that were fetched ahead once are fetched from the states of then."""
        again, self._training = list(ahead), self._capture() if ahead else None
        for number in count(skipped + 1):
            requested = self._requested
            if again:
                self._restore(again.pop(0))
                requested = skipped
            else:
                self._go_on()
            if threading.get_ident() == self._thread:  # another one fetches at any time
                self._fetched.append((number, requested, self._capture()))
            batch = next(batches, _END)
            if batch is _END:
                return
            yield batch

    def _go_on(self) -> None:
        """All that was fetched ahead is fetched again."""
        if self._training is not None:
            self._restore(self._training)
            self._training = None


class _Given:
    """Batches in the place of a DataLoader, which has its length and its attributes.

    Args:
        inside: the DataLoader.
        batches: of one pass.

    Attributes:
        taken: whether somebody iterates over them.
    """

    def __init__(self, inside: DataLoader[Any], batches: Iterator[Any]) -> None:
        self._inside, self._batches = inside, batches
        self.taken = False

    def __iter__(self) -> Iterator[Any]:
        self.taken = True
        return self._batches

    def __len__(self) -> int:
        return len(self._inside)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)
