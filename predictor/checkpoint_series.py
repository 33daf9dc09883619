"""The checkpoints of a history as a series: what stands in the way of a prediction, windows, and the path."""

import itertools
import math
from collections.abc import Sequence

import torch

from cpsr.predictor.protocol import HistoryEntry, Target

__all__ = [
    "TYPICAL_STRAIGHTNESS",
    "check_history",
    "distinct_times",
    "newest_used",
    "path_places",
    "reach_factor",
    "straightness",
    "too_far",
    "window_start",
]


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


def distinct_times(points: Sequence[HistoryEntry]) -> list[int]:
    """Places of the ascending points that are the newest of their time.

    Where the learning rate was 0 the weights did not move: one snapshot stands for all of that time.
    """
    later = [*(point.time for point in points[1:]), math.inf]
    return [place for place, point in enumerate(points) if later[place] > point.time]


def newest_used(row: Sequence[float]) -> int:
    """Position of the newest coefficient that is not 0, of which there is one: what a displacement is counted from."""
    return max(position for position, value in enumerate(row) if value != 0.0)


# No measurement showed a benefit beyond this.
MAX_HORIZON_INTERVALS = 10.0


def too_far(target: Target, fitted: Sequence[HistoryEntry]) -> str | None:
    """Why `target` lies too far ahead of the checkpoints that are used; None where it does not.

    The limit is 10 of their mean intervals, and their own span, in iterations and in cumulative learning rate.

    Args:
        target: where to predict; not before the newest entry.
        fitted: the checkpoints that the prediction is formed from, strictly ascending, at least two.
    """
    horizon = target.iteration - fitted[-1].iteration
    span = fitted[-1].iteration - fitted[0].iteration
    interval = span / (len(fitted) - 1)
    if horizon > MAX_HORIZON_INTERVALS * interval:
        return (
            f"the failure is {horizon} iterations after the newest usable checkpoint, more than "
            f"{MAX_HORIZON_INTERVALS:g} intervals of {interval:g}"
        )
    if horizon > span:
        return (
            f"the failure is {horizon} iterations after the checkpoint, further than the {span} that are predicted from"
        )
    ahead, fitted_time = target.time - fitted[-1].time, fitted[-1].time - fitted[0].time
    if ahead > fitted_time:
        return (
            f"since the checkpoint the learning rates sum to {ahead:g}, more than the {fitted_time:g} over the whole "
            "window that is predicted from"
        )
    return None


def window_start(entries: Sequence[HistoryEntry], window_iterations: int) -> int:
    """Position of the oldest entry that lies within the window before the newest."""
    oldest = entries[-1].iteration - window_iterations
    return next(position for position, entry in enumerate(entries) if entry.iteration >= oldest)


PATH_ITERATIONS = 300
MIN_DIFFERENCES, MAX_DIFFERENCES = 2, 19  # as many as the statistics of a run keep
# Where the weights are not looked at: the median over the failures that the prior table is fitted to.
TYPICAL_STRAIGHTNESS = 0.26
FURTHEST_FACTOR = 2.0  # a noisy model's straightness may be next to nothing
DIGITS = 3  # ranks add their parts up in any order


def path_places(points: Sequence[HistoryEntry]) -> tuple[int, int, int]:
    """Places of the checkpoints that begin, halve and end the path of the last 300 iterations.

    Args:
        points: ascending, at least 3.
    """
    last = len(points) - 1
    interval = (points[last].iteration - points[last - MIN_DIFFERENCES].iteration) / MIN_DIFFERENCES
    differences = min(last, MAX_DIFFERENCES, max(MIN_DIFFERENCES, round(PATH_ITERATIONS / interval)))
    first = last - differences
    return first, first + differences // 2, last


def straightness(products: torch.Tensor) -> float:
    """Cosine between the displacements over the two halves of the path: 1 on a line, about 0 where all is noise.

    Args:
        products: `(2, 2)` inner products of the two displacements, over all weights.

    Returns:
        Rounded; 0 where a half has no length, or is not finite.
    """
    scale = math.sqrt(float(products[0, 0]) * float(products[1, 1]))
    cosine = float(products[0, 1]) / scale if scale > 0.0 else 0.0
    return round(cosine, DIGITS) if math.isfinite(cosine) else 0.0


def reach_factor(products: torch.Tensor, whole: float) -> float:
    """How far an operator follows the line, over the model's reach: as much as its own path is straighter.

    Operators that go somewhere and those that mostly make noise differ: on texts kept out of all fitting it cost 0.16
    horizons less than one reach for all (0.08 to 0.24, eight failures, 2026-11-23).

    Args:
        products: `(2, 2)`, of the operator's path.
        whole: straightness of the model's path.

    Returns:
        0 to 2; 1 where a half of the operator's path has no length, or the model's path has no direction.
    """
    if not (whole > 0.0 and products[0, 0] > 0.0 and products[1, 1] > 0.0):
        return 1.0
    return min(max(straightness(products) / whole, 0.0), FURTHEST_FACTOR)
