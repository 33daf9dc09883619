"""The longest interval from which failures of this run can be predicted, by its own measurements."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import scipy  # loads its submodules at first use: a restart does not wait for them

from cpsr.planner.inputs import Array
from cpsr.planner.recovery_curve import OBSERVATIONS_MAX, CostObservation

__all__ = ["EXPECTED", "Predictable", "predictable"]

# Required probability that most recoveries are useless. Four certainly useless ones, and no useful one, suffice.
CONFIDENCE = 0.95
# A uniform prior, as if one useful and one useless recovery had been observed.
PRIOR_RECOVERIES = 1.0
EXPECTED = "the offline prior and the kept history"


@dataclass(frozen=True)
class Predictable:
    """The longest interval from which failures can be predicted.

    Attributes:
        interval_iterations: None if none is short enough.
        because: the source of that, for the plan's explanation.
    """

    interval_iterations: int | None
    because: str


def predictable(
    longest_iterations: int, costs: Sequence[CostObservation], spacings_iterations: Sequence[int]
) -> Predictable:
    """Lower the bound of prior and history to intervals over which this run's own recoveries were useful.

    A recovery was useless if it cost at least its horizon, as recomputing would have; a vetoed one always is. A
    measured lag has an error: it counts with the certainty of its side, `|2 P(cost >= horizon) - 1|`, so that an
    ambiguous one counts for neither. Each class of intervals reaches from above the next shorter spacing up to a
    spacing. The share of useless recoveries in a class has a Beta posterior, and cannot fall with longer intervals: a
    useful recovery over a longer interval counts for a class too, and a useless one over a shorter interval against
    it. A class is excluded if, from some class up to it or to any later one, most recoveries are useless with a
    probability of 95%.

    Only the newest measurements count, as in the curve of the end cost: an excluded class returns as they age out.

    Source: the sign test with a uniform prior; monotone by the max-min formula of isotonic regression (Robertson,
    Wright and Dykstra, Order Restricted Statistical Inference, 1988), taken over probabilities.

    Args:
        longest_iterations: longest interval to predict from, by the prior and the kept history.
        costs: of this run, oldest first; a vetoed one cost its horizon, without error.
        spacings_iterations: ascending, at least one; a lowered bound is one of them.
    """
    counted = list(costs)[-OBSERVATIONS_MAX:]
    if not counted:
        return Predictable(longest_iterations, EXPECTED)
    sides = _sides(counted, spacings_iterations)
    out = numpy.flatnonzero(_certainty(sides) >= CONFIDENCE)
    useless, useful = sides.sum(axis=1)
    measured = (
        f"of {len(counted)} measured recoveries about {useful:.0f} cost less than recomputing and {useless:.0f} did not"
    )
    below = [longest_iterations] if not out.size else list(spacings_iterations[: out[0]])
    if below and below[-1] >= longest_iterations:
        return Predictable(longest_iterations, f"{EXPECTED}; {measured}, which does not lower it")
    because = (
        f"{measured}: from longer intervals most would not (at least {CONFIDENCE:.0%} sure); {EXPECTED} would allow "
        f"{longest_iterations} iterations"
    )
    return Predictable(below[-1] if below else None, because)


def _sides(costs: Sequence[CostObservation], spacings: Sequence[int]) -> Array:
    """Weights of useless and of useful recoveries in each class; `(2, classes)`."""
    sides = numpy.zeros((2, len(spacings)))
    for cost in costs:
        place = min(bisect_left(spacings, cost.interval_iterations), len(spacings) - 1)
        sure = 2 * _useless(cost) - 1
        sides[0 if sure > 0 else 1, place] += abs(sure)
    return sides


def _useless(cost: CostObservation) -> float:
    """Probability that a recovery cost at least what recomputing would have."""
    excess, error = cost.end_cost_iterations - cost.horizon_iterations, cost.standard_error_iterations
    if error == 0:
        return float(excess >= 0)
    return 0.5 * (1 + math.erf(excess / (error * math.sqrt(2))))


def _certainty(sides: Array) -> Array:
    """Probability that most recoveries of each class are useless; not falling from class to class."""
    useless, useful = numpy.cumsum(numpy.pad(sides, ((0, 0), (1, 0))), axis=1)
    # Of the classes from a row's to a column's: P(share > 1/2) of a Beta(1 + useless, 1 + useful).
    windows = scipy.special.betainc(
        PRIOR_RECOVERIES + useful[None, 1:] - useful[:-1, None],
        PRIOR_RECOVERIES + useless[None, 1:] - useless[:-1, None],
        0.5,
    )
    classes = range(sides.shape[1])
    return numpy.array([max(windows[first, place:].min() for first in range(place + 1)) for place in classes])
