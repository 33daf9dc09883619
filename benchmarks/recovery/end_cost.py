"""What a failure costs in the end: the gap in the final loss, in iterations of equal worth."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy

__all__ = ["Ending", "IterationWorth", "WorthUnknownError", "end_cost_iterations", "iteration_worth"]

# A worth is trusted only if the final losses show it this clearly: every cost is divided by it.
MIN_STANDARD_ERRORS = 3.0


@dataclass(frozen=True)
class Ending:
    """How one whole training ended.

    Attributes:
        group: trainings of one group differ in length alone, as those of one seed do.
        iterations: length of the training, and so of its schedule.
        loss_nats: at its end.
    """

    group: Hashable
    iterations: int
    loss_nats: float


@dataclass(frozen=True)
class IterationWorth:
    """What one more iteration of the whole schedule takes off the final loss.

    Attributes:
        nats: that loss; positive.
        standard_error_nats: of `nats`, over the noise of trainings.
        iterations: length of the training that it holds for.
    """

    nats: float
    standard_error_nats: float
    iterations: int


class WorthUnknownError(ValueError):
    """The trainings do not show that a longer one ends lower."""


def iteration_worth(endings: Sequence[Ending], iterations: int) -> IterationWorth:
    """Worth of an iteration, from trainings that are somewhat shorter and longer than the one in question.

    The final loss is fitted as `a_group - k * log(length)` by least squares, each group with its own level. The worth
    is `k / iterations`.

    Args:
        endings: in each group at least two lengths; lengths within 20% of `iterations`, on both sides of it.
        iterations: length of the training in question.

    Raises:
        WorthUnknownError: the fit's slope is not three standard errors above 0.
        ValueError: too few trainings to fit it.
    """
    groups = sorted({ending.group for ending in endings}, key=repr)
    freedom = len(endings) - len(groups) - 1
    if freedom < 1:
        raise ValueError(f"{len(endings)} trainings in {len(groups)} groups leave nothing to judge a slope by")
    levels = numpy.array([[ending.group == group for group in groups] for ending in endings], dtype=numpy.float64)
    lengths = numpy.log([ending.iterations / iterations for ending in endings])
    losses = numpy.array([ending.loss_nats for ending in endings])
    lengths, losses = (values - levels @ ((levels.T @ values) / levels.sum(axis=0)) for values in (lengths, losses))
    scatter = float(lengths @ lengths)
    if scatter == 0.0:
        raise ValueError("all trainings of a group are of one length")
    slope = -float(lengths @ losses) / scatter
    residuals = losses + slope * lengths
    error = math.sqrt(float(residuals @ residuals) / freedom / scatter)
    if not slope > MIN_STANDARD_ERRORS * error:
        raise WorthUnknownError(
            f"one more iteration takes {slope / iterations:.2e} +- {error / iterations:.2e} nats off the final loss: "
            "too uncertain to measure a cost in iterations; train more seeds, or at a rate and length at which a "
            "longer training ends lower"
        )
    return IterationWorth(slope / iterations, error / iterations, iterations)


def end_cost_iterations(final_gap_nats: float, worth: IterationWorth, repeated_iterations: float = 0.0) -> float:
    """Cost of a failure in iterations: what is missing at the end, and what was trained again.

    Recomputing to the failure leaves no gap, and costs exactly the iterations that it repeats.

    Args:
        final_gap_nats: final loss of the run that failed, over that of the run that never did.
        worth: of an iteration of this training.
        repeated_iterations: trained a second time because of the failure.
    """
    return final_gap_nats / worth.nats + repeated_iterations
