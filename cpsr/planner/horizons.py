"""How far failures lie behind the checkpoint that they go back to, as a distribution: what a mean cannot tell."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from cpsr.planner.inputs import Array

__all__ = ["Horizons"]

# Beyond this many failures that end a chain a longer one has a probability of exp(-12), which is left out.
FAR_CHAINS = 12.0
# Terms of the series below; those that matter are few, since each later one begins an interval farther out.
TERMS_MAX = 64
# A term smaller than this share of the sum so far is none.
NEGLIGIBLE = 1e-9


@dataclass(frozen=True)
class Horizons:
    """Distances from the checkpoint to the failure, in iterations, of failures without memory; arrays of one shape.

    A life is renewed once its first checkpoint is durable. Its failure then lies `persist` to `persist + interval`
    iterations behind the newest durable one. Each life after it that is not renewed adds what it had trained: the next
    failure goes back to the same checkpoint. With `l` the failures per iteration, `c` the interval, `f` the first, `s`
    the stall and `p` the persist time in iterations, and `r = exp(-l (f + s + p))`, the sum's Laplace transform is

        r / (1 - exp(-l (c + s)))  *  exp(-z p) (l + z b exp(-z (c - p)) - l exp(-l (c + s)) exp(-z c))
                                      / (z (1 - a exp(-z f)) + l r exp(-z (f + p)))

    where `b = (1 - exp(-l s)) exp(-l (c - p))` and `a = (1 - exp(-l s)) exp(-l f)` are failures during a stall.
    Expanded in `a` and `l r` it is a series of which finitely many terms reach any distance, each a power of it.

    Attributes:
        failures_per_iteration: of training without checkpoints, positive.
        interval_iterations: between two checkpoints.
        first_iterations: from a restart to the first checkpoint.
        stall_iterations: time of a stall, over that of an iteration.
        persist_iterations: the same of the time from the stall to a durable checkpoint; at most the interval.
    """

    failures_per_iteration: Array
    interval_iterations: Array
    first_iterations: Array
    stall_iterations: Array
    persist_iterations: Array

    def mean_shortfall(self, threshold_iterations: Array, mean_iterations: Array) -> Array:
        """Mean of `max(threshold - distance, 0)` in iterations.

        Args:
            threshold_iterations: of any sign, and infinite as well.
            mean_iterations: distance, which decides where the threshold is farther than any failure.
        """
        rate, first, persist = self.failures_per_iteration, self.first_iterations, self.persist_iterations
        in_stall = -numpy.expm1(-rate * self.stall_iterations)
        spoiled = in_stall * numpy.exp(-rate * first)
        renewed = numpy.exp(-rate * (first + self.stall_iterations + persist))
        reach = threshold_iterations - persist
        far = rate * renewed * reach > FAR_CHAINS
        reach = numpy.where(far, 0.0, reach)
        total = numpy.zeros(numpy.shape(reach))
        term = self._terms(renewed, in_stall)
        for failed in range(TERMS_MAX):
            for stalled in range(TERMS_MAX):
                left = reach - failed * (first + persist) - stalled * first
                found = math.comb(failed + stalled, stalled) * spoiled**stalled * term(left, failed)
                total += found
                if not _matters(found, total):
                    break
            if stalled == 0:
                break
        return numpy.asarray(numpy.where(far, threshold_iterations - mean_iterations, renewed * total))

    def _terms(self, renewed: Array, in_stall: Array) -> Callable[[Array, int], Array]:
        """The powers of the distance that is left after so many lives which were not renewed."""
        rate, interval = self.failures_per_iteration, self.interval_iterations
        period = rate * (interval + self.stall_iterations)
        none, some = numpy.exp(-period), -numpy.expm1(-period)
        trained = interval - self.persist_iterations
        stalled = in_stall * numpy.exp(-rate * numpy.maximum(trained, 0.0))
        again = -renewed * rate

        def term(left: Array, failed: int) -> Array:
            near, middle, later = (numpy.maximum(left - less, 0.0) for less in (0.0, trained, interval))
            second = rate * (near * near * (again * near) ** failed - none * later * later * (again * later) ** failed)
            first = stalled * middle * (again * middle) ** failed
            return numpy.asarray((second / (failed + 2) + first) / (some * math.factorial(failed + 1)))

        return term


def _matters(term: Array, total: Array) -> bool:
    return bool(numpy.any(numpy.abs(term) > NEGLIGIBLE * numpy.abs(total)))
