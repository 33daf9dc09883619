"""The distribution of the distance between a failure and the checkpoint that recovery uses."""

from dataclasses import dataclass

import numpy

from cpsr.planner.inputs import Array

__all__ = ["Horizons"]

# Points of the grid from the nearest distance up to the threshold. The error falls with their square: in realistic jobs
# it is below 0.1% of the threshold, and below 1% if nearly all failures happen in stalls.
POINTS = 32
# Cells computed together: their grids stay in the processor's cache, which is several times as fast.
BLOCK_CELLS = 512
# Below this `u - (1 - exp(-u))` is taken from its series: the difference would have lost its digits.
SMALL_EXPONENT = 1e-4


@dataclass(frozen=True)
class Horizons:
    """Distances from the checkpoint to the failure, in iterations, of memoryless failures; arrays of one shape.

    A life is *renewed* once its first checkpoint is durable. Its failure then lies `persist` to `persist + interval`
    iterations behind the newest durable one. Each life after it that is not renewed adds what it had trained: the next
    failure goes back to the same checkpoint. The distance is `persist + B + X_1 + ... + X_n`, where `n` is geometric,
    and `B` and the `X_i` are the iterations trained until an exponentially distributed failure, with one stall.

    The distribution of the sum follows from its renewal equation on a grid (in actuarial mathematics: Panjer's
    recursion for a compound geometric distribution). Mass between two points is divided so that its mean stays. All
    terms are probabilities: nothing is subtracted, and no result is larger than the threshold allows.

    Attributes:
        failures_per_iteration: of training without checkpoints, positive.
        interval_iterations: between two checkpoints, positive.
        first_iterations: from a restart to the first checkpoint, positive.
        stall_iterations: duration of a stall, in the time of an iteration.
        persist_iterations: from the stall to a durable checkpoint, in the same unit; at most the interval.
    """

    failures_per_iteration: Array
    interval_iterations: Array
    first_iterations: Array
    stall_iterations: Array
    persist_iterations: Array

    def mean_shortfall(self, threshold_iterations: Array) -> Array:
        """Mean of `max(threshold - distance, 0)` in iterations.

        At least `max(threshold - mean distance, 0)`, and at most `max(threshold - persist, 0)`.

        Args:
            threshold_iterations: of any sign, and infinite as well.

        Returns:
            Iterations; NaN if an input is NaN, or too large to compute with.
        """
        cells = [numpy.ravel(figures) for figures in (*vars(self).values(), threshold_iterations)]
        found = numpy.empty_like(cells[-1])
        with numpy.errstate(all="ignore"):
            for start in range(0, len(found), BLOCK_CELLS):
                block = slice(start, start + BLOCK_CELLS)
                found[block] = _mean_shortfall(*(figures[block] for figures in cells))
        unbounded = numpy.maximum(cells[-1], 0.0)  # at an infinite threshold
        return numpy.where(numpy.isfinite(cells[-1]), found, unbounded).reshape(numpy.shape(threshold_iterations))


def _mean_shortfall(
    rate: Array, interval: Array, first: Array, stall: Array, persist: Array, threshold: Array
) -> Array:
    """The same, of one block; `(cells,)`."""
    reach = numpy.maximum(threshold - persist, 0.0)
    step = numpy.where(reach > 0, reach, 1.0) / POINTS
    grid = numpy.arange(POINTS + 1)[:, None] * step
    renewed = numpy.exp(-rate * (first + stall + persist))
    # Second differences of a mean shortfall are the masses at the points.
    not_renewed = numpy.diff(_life_shortfall(grid, rate, first, stall, first + persist), 2, axis=0, prepend=0.0) / step
    trained = _distribution_of_sum(renewed, numpy.maximum(not_renewed, 0.0))
    # From the point k of the grid the reach is POINTS - k steps farther.
    since = numpy.where(reach > 0, grid[:0:-1], 0.0)
    base = _life_shortfall(since, rate, numpy.maximum(interval - persist, 0.0), stall, interval)
    return numpy.asarray((trained * base).sum(axis=0) / -numpy.expm1(-rate * (interval + stall)))


def _life_shortfall(distance: Array, rate: Array, until: Array, stall: Array, end: Array) -> Array:
    """Mean of `max(distance - trained, 0)` over failures before the end, others counting as 0.

    A life stalls once, after `until` iterations. The iterations that it trained have the distribution function
    `1 - exp(-rate x)` before the stall, and `1 - exp(-rate (x + stall))` after it. This is its integral.
    """
    exponent = rate * numpy.clip(distance, 0.0, end)
    failed = -numpy.expm1(-exponent)
    small = exponent * exponent * (0.5 - exponent / 6)
    found = numpy.where(exponent < SMALL_EXPONENT, small, exponent - failed)
    found += -numpy.expm1(-rate * stall) * numpy.maximum(failed + numpy.expm1(-rate * until), 0.0)
    found /= rate
    return numpy.asarray(found + numpy.maximum(distance - end, 0.0) * -numpy.expm1(-rate * (end + stall)))


def _distribution_of_sum(renewed: Array, masses: Array) -> Array:
    """Masses of the sum of a geometric number of independent terms; `(points, cells)`.

    Args:
        renewed: probability that there is no further term, `(cells,)`.
        masses: of one further term at every point of the grid, `(points, cells)`.
    """
    found = numpy.empty_like(masses)
    other = 1.0 - masses[0]  # no further term, or one that is not 0
    found[0] = renewed / other
    for point in range(1, len(masses)):
        found[point] = (masses[1 : point + 1] * found[:point][::-1]).sum(axis=0) / other
    return found
