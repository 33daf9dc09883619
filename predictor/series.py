"""The series of one operator's snapshots: which entries hold a new one, and where they lie on the time axis."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from cpsr.predictor.protocol import History, HistoryEntry, Target

__all__ = ["Series", "check_history", "distinct_times", "newest_used", "operator_series"]


@dataclass(frozen=True)
class Series:
    """Distinct snapshots of one operator, oldest first.

    Attributes:
        indices: position of each snapshot in the history.
        points: when it was taken (an entry of the history where that is when the entry was made).
    """

    indices: tuple[int, ...]
    points: tuple[HistoryEntry, ...]


def check_history(entries: Sequence[HistoryEntry], target: Target) -> None:
    """Refuse a history or a target that no predictor can work with.

    Raises:
        ValueError: iterations repeat or descend, a time or learning rate is not finite or the time descends, or the
            target lies before the newest entry.
    """
    for entry in entries:
        if not (math.isfinite(entry.time) and math.isfinite(entry.learning_rate)):
            raise ValueError(f"history entry at iteration {entry.iteration}: time or learning rate is not finite")
    for older, newer in itertools.pairwise(entries):
        if newer.iteration <= older.iteration:
            raise ValueError(f"history is not ascending: iteration {newer.iteration} follows {older.iteration}")
        if newer.time < older.time:
            raise ValueError(f"cumulative learning rate falls after iteration {older.iteration}")
    if not (math.isfinite(target.time) and math.isfinite(target.peak_learning_rate)):
        raise ValueError(f"target at iteration {target.iteration}: time or peak learning rate is not finite")
    if entries and (target.iteration < entries[-1].iteration or target.time < entries[-1].time):
        raise ValueError(
            f"the target (iteration {target.iteration}, time {target.time:g}) lies before the newest history entry "
            f"(iteration {entries[-1].iteration}, time {entries[-1].time:g})"
        )


def operator_series(history: History, operator: str, usable: Sequence[int]) -> Series:
    """Distinct snapshots of `operator` in the usable entries (positions, ascending).

    A snapshot that several entries repeat counts once. Times between entries are interpolated; before the first
    entry the time axis goes on at the pace of the first two.
    """
    position_of: dict[int, int] = {}  # iteration the snapshot was taken at -> newest entry that holds it
    for position in usable:
        position_of[history.taken_at(operator, position)] = position
    taken = sorted(position_of)
    entries = list(history.entries)
    exact = {entry.iteration: entry for entry in entries}
    points = tuple(exact[iteration] if iteration in exact else _between(entries, iteration) for iteration in taken)
    return Series(tuple(position_of[iteration] for iteration in taken), points)


def _between(entries: list[HistoryEntry], iteration: int) -> HistoryEntry:
    first, newest = entries[0], entries[-1]
    if iteration > newest.iteration:
        raise ValueError(f"a snapshot taken at iteration {iteration} is newer than its entry ({newest.iteration})")
    if iteration < first.iteration:
        second = entries[1] if len(entries) > 1 else first
        span = second.iteration - first.iteration
        pace = (second.time - first.time) / span if span else first.learning_rate
        return HistoryEntry(iteration, first.time - pace * (first.iteration - iteration), first.learning_rate)
    older = [entry for entry in entries if entry.iteration < iteration][-1]
    time = numpy.interp(iteration, [entry.iteration for entry in entries], [entry.time for entry in entries])
    return HistoryEntry(iteration, float(time), older.learning_rate)


def distinct_times(points: Sequence[HistoryEntry], places: Sequence[int]) -> list[int]:
    """Those of the ascending `places` that are the newest of their time.

    Where the learning rate was 0 the weights did not move: one snapshot stands for all of that time.
    """
    return [
        place
        for place, later in itertools.pairwise([*places, None])
        if place is not None and (later is None or points[later].time > points[place].time)
    ]


def newest_used(row: Sequence[float]) -> int:
    """Position of the newest entry with a nonzero coefficient: the weights that a displacement is counted from.

    Raises:
        ValueError: every coefficient is zero, so the row predicts nothing.
    """
    for position in range(len(row) - 1, -1, -1):
        if row[position] != 0.0:
            return position
    raise ValueError("every coefficient of the row is zero")
