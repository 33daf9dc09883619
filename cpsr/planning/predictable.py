"""From how far apart checkpoints failures of this run can be predicted: a bound that its own measurements move."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import scipy  # its parts are loaded at their first use: a restart does not wait for them

from cpsr.planner.inputs import Array
from cpsr.planner.recovery_curve import OBSERVATIONS_MAX, LagObservation

__all__ = ["EXPECTED", "Predictable", "predictable"]

# So sure must it be that most recoveries are of no use. Four that surely were of none, and none of use, suffice.
CONFIDENCE = 0.95
# One recovery of use and one of none, as if seen beforehand: with nothing measured, every share is as likely.
PRIOR_RECOVERIES = 1.0
EXPECTED = "the offline prior and the kept history"


@dataclass(frozen=True)
class Predictable:
    """The longest interval from which failures are predicted.

    Attributes:
        interval_iterations: None where none is short enough.
        because: what says so, for the plan's explanation.
    """

    interval_iterations: int | None
    because: str


def predictable(
    longest_iterations: int, lags: Sequence[LagObservation], spacings_iterations: Sequence[int]
) -> Predictable:
    """Lower the bound of prior and history to intervals over which this run's own recoveries were of use.

    A recovery was of no use where it cost at least its horizon, as recomputing would have; a veto does. A measured lag
    has an error: it counts by how sure its side is, `|2 P(lag >= horizon) - 1|`, so that one which may lie on either
    counts for neither. In each class of intervals, from above the next shorter spacing up to a spacing, the share of
    recoveries that are of no use has a Beta posterior. With longer intervals it cannot become smaller: good ones over
    longer intervals speak for a class as well, and bad ones over shorter ones against it. A class is out where, from
    some class up to it or beyond, and however far beyond, most recoveries are of no use with a probability of 95%.

    Only the newest measurements count, as in the curve of the lag: a class that is out comes back as they pass.

    Source: the sign test with a uniform prior; monotone by the max-min formula of isotonic regression (Robertson,
    Wright and Dykstra, Order Restricted Statistical Inference, 1988), taken over probabilities.

    Args:
        longest_iterations: that can be predicted from, by the prior and the kept history.
        lags: of this run, oldest first; a vetoed one has its horizon for a lag, and no error.
        spacings_iterations: ascending, at least one; a bound that was lowered is one of them.
    """
    counted = list(lags)[-OBSERVATIONS_MAX:]
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


def _sides(lags: Sequence[LagObservation], spacings: Sequence[int]) -> Array:
    """Weights of recoveries that were of no use, and of those that were, in each class; `(2, classes)`."""
    sides = numpy.zeros((2, len(spacings)))
    for lag in lags:
        place = min(bisect_left(spacings, lag.interval_iterations), len(spacings) - 1)
        sure = 2 * _useless(lag) - 1
        sides[0 if sure > 0 else 1, place] += abs(sure)
    return sides


def _useless(lag: LagObservation) -> float:
    """Probability that a recovery cost at least what recomputing would have."""
    excess, error = lag.lag_iterations - lag.horizon_iterations, lag.standard_error_iterations
    if error == 0:
        return float(excess >= 0)
    return 0.5 * (1 + math.erf(excess / (error * math.sqrt(2))))


def _certainty(sides: Array) -> Array:
    """Of each class, that most recoveries in it are of no use; not falling from class to class."""
    useless, useful = numpy.cumsum(numpy.pad(sides, ((0, 0), (1, 0))), axis=1)
    # Of the classes from a row's to a column's: P(share > 1/2) of a Beta(1 + useless, 1 + useful).
    windows = scipy.special.betainc(
        PRIOR_RECOVERIES + useful[None, 1:] - useful[:-1, None],
        PRIOR_RECOVERIES + useless[None, 1:] - useless[:-1, None],
        0.5,
    )
    classes = range(sides.shape[1])
    return numpy.array([max(windows[first, place:].min() for first in range(place + 1)) for place in classes])
