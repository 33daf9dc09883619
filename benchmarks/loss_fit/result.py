"""From a run's losses to what its fits were worth."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.loss_fit.losses import RunLosses
from cpsr.fitter.loss_fit import POINTS_MIN, LossFit, fit_loss
from cpsr.fitter.phases import MIN_ITERATIONS, PhaseDetector

__all__ = ["CONFIDENCE", "PhaseFit", "Summary", "fit_phases", "summarise"]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class PhaseFit:
    """The fit at the end of one phase, compared with the losses that came after it.

    Attributes:
        run: name of the run.
        kind: of its losses, `training` or `validation`.
        first_iteration: of the phase.
        last_iteration: of the phase, at which the fit was made from all losses so far.
        ended_by: `change` of the second moment, or `length`.
        next_iteration: up to which the forecast is judged.
        rmse_nats: over the phase, in sample.
        next_rmse_nats: over the stretch that came next.
        next_mean_nats: mean of its losses less forecasts.
        coverage: share of them inside the 95% band.
        unweighted_rmse_nats: over the same stretch, of one exponential by least squares on all losses so far alike.
        seconds: that the fit took.
        fit: the curve.
    """

    run: str
    kind: str
    first_iteration: int
    last_iteration: int
    ended_by: str
    next_iteration: int
    rmse_nats: float
    next_rmse_nats: float
    next_mean_nats: float
    coverage: float
    unweighted_rmse_nats: float
    seconds: float
    fit: LossFit

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        names = [name for name in self.__dataclass_fields__ if name != "fit"]
        return {name: getattr(self, name) for name in names} | {"fit": self.fit.to_dict()}


@dataclass(frozen=True)
class Summary:
    """All forecasts of one kind of loss.

    Attributes:
        kind: `training` or `validation`.
        forecasts: how many.
        rmse_nats: median over them, in sample.
        next_rmse_nats: median over them.
        unweighted_rmse_nats: median over them.
        coverage: mean over them.
    """

    kind: str
    forecasts: int
    rmse_nats: float
    next_rmse_nats: float
    unweighted_rmse_nats: float
    coverage: float


def fit_phases(losses: RunLosses, phase_iterations: int) -> list[PhaseFit]:
    """A fit at the end of every phase that has losses after it: as many iterations as the phase had, or what is left.

    Args:
        losses: of one run.
        phase_iterations: longest length of a phase.
    """
    found = []
    for first, last, ended_by in _phase_ends(losses, phase_iterations):
        known = losses.iterations <= last
        ahead = ~known & (losses.iterations <= 2 * last - first)
        if min(known.sum(), ahead.sum()) >= POINTS_MIN:
            found.append(_phase_fit(losses, (first, last, ended_by), known, ahead))
    return found


def summarise(fits: Sequence[PhaseFit]) -> list[Summary]:
    """The forecasts of each kind of loss together."""
    found = []
    for kind in dict.fromkeys(fit.kind for fit in fits):
        mine = [fit for fit in fits if fit.kind == kind]
        found.append(
            Summary(
                kind=kind,
                forecasts=len(mine),
                rmse_nats=statistics.median(fit.rmse_nats for fit in mine),
                next_rmse_nats=statistics.median(fit.next_rmse_nats for fit in mine),
                unweighted_rmse_nats=statistics.median(fit.unweighted_rmse_nats for fit in mine),
                coverage=statistics.fmean(fit.coverage for fit in mine),
            )
        )
    return found


def _phase_fit(
    losses: RunLosses, phase: tuple[int, int, str], known: NDArray[numpy.bool_], ahead: NDArray[numpy.bool_]
) -> PhaseFit:
    (first, last, ended_by), past, future = phase, losses.iterations[known], losses.iterations[ahead]
    started = time.perf_counter()
    fit = fit_loss(past, losses.losses[known], span_iterations=last - first)
    seconds = time.perf_counter() - started
    missed = losses.losses[ahead] - fit.at(future)
    low, high = fit.band(future, CONFIDENCE)
    inside = (losses.losses[ahead] >= low) & (losses.losses[ahead] <= high)
    line = numpy.polyfit(past, numpy.log(losses.losses[known]), 1)
    return PhaseFit(
        run=losses.run,
        kind=losses.kind,
        first_iteration=first,
        last_iteration=last,
        ended_by=ended_by,
        next_iteration=int(future[-1]),
        rmse_nats=fit.rmse_nats,
        next_rmse_nats=_rmse(missed),
        next_mean_nats=float(missed.mean()),
        coverage=float(inside.mean()),
        unweighted_rmse_nats=_rmse(losses.losses[ahead] - numpy.exp(numpy.polyval(line, future))),
        seconds=seconds,
        fit=fit,
    )


def _phase_ends(losses: RunLosses, phase_iterations: int) -> list[tuple[int, int, str]]:
    """First and last iteration of every phase, and what ended it."""
    if losses.phases:
        return list(losses.phases)
    detector = PhaseDetector(min_iterations=min(MIN_ITERATIONS, phase_iterations), max_iterations=phase_iterations)
    if losses.mean_exp_avg_sq:
        phases = [detector.observe(iteration, mean) for iteration, mean in losses.mean_exp_avg_sq.items()]
        return [(phase.first_iteration, phase.last_iteration, phase.ended_by) for phase in phases if phase]
    last = int(losses.iterations[-1]) if len(losses.iterations) else 0
    return [(end - phase_iterations, end, "length") for end in range(phase_iterations, last + 1, phase_iterations)]


def _rmse(residuals: NDArray[numpy.float64]) -> float:
    return float(numpy.sqrt(numpy.mean(residuals**2)))
