"""The repetitions of a loop: how long they took, and what they tell of the hints to come.

A repetition that is still to come looks like the last whole one. Its seconds lie on the line through those of the last
few hundred, where that rises or falls beyond chance; else it takes their mean. The first repetition is left out as soon
as there is another one, since it often prepares something.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["HINTS_MAX", "Repetitions"]

HINTS_MAX = 200_000  # of a loop, that are looked at
_REMEMBERED = 256.0  # repetitions that the line is fitted to; older ones fade
_LINE_MIN = 8.0  # repetitions that make a line
_BEYOND_CHANCE = 9.0  # square of a slope in its standard errors

Seconds = NDArray[np.float64]


class Repetitions:
    """The repetitions of one loop with hints, in the function's own seconds.

    Args:
        position: number of the current repetition.
        is_whole: the current repetition is followed from its begin; not where a call has gone on inside it.

    Attributes:
        last: seconds before each hint of the last whole repetition; None: none has ended.
    """

    def __init__(self, position: int = 0, *, is_whole: bool = True) -> None:
        self.last: list[float] | None = None
        self._position, self._is_whole = position, is_whole
        self._current: list[float] = []  # seconds before each hint
        self._ended = 0
        self._weight = self._mean_at = self._mean = self._at_at = self._at_seconds = self._seconds_seconds = 0.0

    def arrive(self, position: int, seconds: float) -> None:
        """The function has come to a hint.

        Args:
            position: number of the repetition.
            seconds: since the hint before.
        """
        if position != self._position:
            if self._is_whole and self._current:
                self.last = self._current
                self._learn(self._position, sum(self.last))
            self._position, self._current, self._is_whole = position, [], True
        if len(self._current) < HINTS_MAX:
            self._current.append(seconds)

    def _learn(self, position: int, seconds: float) -> None:
        """Add a point to the line."""
        self._ended += 1
        if self._ended == 2:  # what was learned is forgotten
            self._weight = self._at_at = self._at_seconds = self._seconds_seconds = 0.0
        kept = 1 - 1 / _REMEMBERED
        self._weight = kept * self._weight + 1
        at, off = position - self._mean_at, seconds - self._mean
        self._mean_at += at / self._weight
        self._mean += off / self._weight
        self._at_at = kept * self._at_at + at * (position - self._mean_at)
        self._at_seconds = kept * self._at_seconds + at * (seconds - self._mean)
        self._seconds_seconds = kept * self._seconds_seconds + off * (seconds - self._mean)

    def ahead(self, inside: Seconds | None, length: int | None) -> Seconds | None:
        """Seconds before each hint until the loop ends, from the hint that the function has come to.

        Args:
            inside: the same of the loop within this one that the function is in, until that ends; None: not known.
            length: repetitions in all; None: not known.

        Returns:
            None: not known, or too many. Parts that the function has never come to are left out.
        """
        if self.last is not None:
            whole = np.array(self.last)
            rest = whole[len(self._current) :]
        elif inside is not None:
            rest, whole = inside, np.concatenate([self._current, inside])
        else:
            return None
        if length is None or self._position > length:  # a list that grows, or a stream of several passes
            return None
        if len(whole) * (length - self._position) > HINTS_MAX or not whole.any():
            return None
        expected = self._expected(np.arange(self._position + 1, length + 1), float(whole.sum()))
        return np.concatenate([rest, np.outer(expected / whole.sum(), whole).ravel()])

    def _expected(self, positions: NDArray[np.int64], seconds: float) -> Seconds:
        """Seconds of the repetitions to come; those of the current one where none has ended."""
        if not self._ended:
            return np.full(len(positions), seconds)
        slope = self._at_seconds / self._at_at if self._at_at else 0.0
        explained = slope * self._at_seconds
        chance = (self._seconds_seconds - explained) / max(self._weight - 2, 1.0)
        if self._weight < _LINE_MIN or explained < _BEYOND_CHANCE * chance:
            slope = 0.0
        seen = np.minimum(positions, self._position + self._ended)  # no further ahead than it was followed
        return np.maximum(self._mean + slope * (seen - self._mean_at), 0.0)


def seconds_ahead(loops: Sequence[tuple[Repetitions, int | None]]) -> Seconds | None:
    """Seconds before each hint until the outermost loop ends; None: not known.

    Args:
        loops: around the hint that the function has come to, outer ones first, with their lengths.
    """
    found: Seconds | None = np.zeros(0)
    for repetitions, length in reversed(loops):
        found = repetitions.ahead(found, length)
    return found
