"""How straight the weights' recent path is: what tells a run that goes somewhere from one that is mostly noise."""

import math
from collections.abc import Sequence

import torch

from cpsr.predictor.protocol import History, HistoryEntry

__all__ = ["PATH_ITERATIONS", "TYPICAL_STRAIGHTNESS", "path_places", "path_positions", "reach_factor", "straightness"]

PATH_ITERATIONS = 300
MIN_DIFFERENCES, MAX_DIFFERENCES = 2, 19  # as many as the statistics of a run keep
# Where the weights are not looked at: the median over the failures that the prior table is fitted to.
TYPICAL_STRAIGHTNESS = 0.29
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


def path_positions(history: History, usable: Sequence[int]) -> list[int]:
    """Positions of these checkpoints in the history.

    Args:
        history: whose entries are meant.
        usable: positions that may be read, ascending, at least 3.
    """
    return [usable[place] for place in path_places([history.entries[position] for position in usable])]


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
