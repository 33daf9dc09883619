"""Which jobs are run to hold the plan's forecast against what happens, and when they fail."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy

from cpsr.benchmarks.plan.failing_job import FailingJob, Failure
from cpsr.demo.main import RANKS
from cpsr.errors import ConfigError

__all__ = ["Injection", "Mode", "failing_job", "failures_of", "fault_free_job"]

Mode = Literal["exact", "auto"]
SECONDS_PER_HOUR = 3600.0
# The planner is given the rate and does not have to find it: what is measured is the forecast, not the estimate of the
# rate. A prior of so many failures keeps the stretch in which nothing fails from counting against it.
MTBF_PRIOR_FAILURES = 100.0
# A job ends well before its learning rate does, so that the loss still falls there, and shows the time.
SCHEDULE_SHARE = 0.65
# The run without failures goes on for longer; it too is asked to leave, and must not be through before.
FAULT_FREE_SHARE = 0.9
PHASE_ITERATIONS = (50, 100)  # at least and at most: the planner plans anew several times in so short a job
FAULT_FREE_INTERVAL_ITERATIONS = 50  # a run to compare with needs no plan


@dataclass(frozen=True)
class Injection:
    """The lengths of the jobs, in iterations.

    Attributes:
        failures: of each job.
        mtbf_iterations: trained to a failure, on average.
        first: training before any of them; the planner has measured by then.
        tail: training after the last; the lag is taken over the last 100 iterations of it.
        beyond: the fault-free run goes on, so that a job can be found ahead of it.
        apart: at least, between two failures: a restarted process takes some steps.
    """

    failures: int = 10
    mtbf_iterations: int = 88
    first: int = 250
    tail: int = 170
    beyond: int = 400
    apart: int = 15

    @property
    def last(self) -> int:
        """Work after which nothing fails any more."""
        return self.first + self.failures * self.mtbf_iterations

    @property
    def iterations(self) -> int:
        """Where a job ends."""
        return self.last + self.tail

    @property
    def schedule_iterations(self) -> int:
        """What its learning rate is meant for."""
        return round(max(self.iterations / SCHEDULE_SHARE, (self.iterations + self.beyond) / FAULT_FREE_SHARE))


def failures_of(injection: Injection, seed: int) -> tuple[Failure, ...]:
    """A Poisson process over the work from `first` to `last`, given how many there are and that none are too close.

    Without the distance they would be sorted uniform numbers; these are drawn over what the distances leave free, and
    moved apart. The rank is drawn too.

    Raises:
        ConfigError: so many do not fit.
    """
    room = injection.failures * injection.mtbf_iterations - (injection.failures - 1) * injection.apart
    if room <= 0:
        raise ConfigError(
            f"with one every {injection.mtbf_iterations} iterations there is no room for failures that are "
            f"{injection.apart} apart"
        )
    random = numpy.random.default_rng(seed)
    places = numpy.sort(random.uniform(0.0, room, injection.failures)) + injection.first
    ranks = random.integers(RANKS, size=injection.failures)
    return tuple(
        Failure(int(rank), int(place) + number * injection.apart)
        for number, (rank, place) in enumerate(zip(ranks, places, strict=True))
    )


def fault_free_job(injection: Injection, seed: int) -> FailingJob:
    """The same training without a failure."""
    settings = {"checkpoint": {"interval_iterations": FAULT_FREE_INTERVAL_ITERATIONS}}
    stop = injection.iterations + injection.beyond
    return FailingJob(seed, "exact", stop, injection.schedule_iterations, injection.last, (), settings)


def failing_job(injection: Injection, seed: int, mode: Mode, iteration_seconds: float) -> FailingJob:
    """The job that fails.

    Args:
        injection: the lengths.
        seed: of everything.
        mode: exact recomputes; auto takes the cheaper, as the product does by default.
        iteration_seconds: of the fault-free run, which makes the true mean time between failures.
    """
    shortest, longest = PHASE_ITERATIONS
    settings: dict[str, Any] = {
        # As where the machine is lost: what outlives a process in memory makes failures cheaper than is planned for.
        "checkpoint": {"interval_iterations": None, "shared_memory": False},
        "planner": {
            "mtbf_hours": injection.mtbf_iterations * iteration_seconds / SECONDS_PER_HOUR,
            "mtbf_prior_failures": MTBF_PRIOR_FAILURES,
        },
        "fitter": {"phase_min_iterations": shortest, "phase_max_iterations": longest},
    }
    return FailingJob(
        seed,
        mode,
        injection.iterations,
        injection.schedule_iterations,
        injection.last,
        failures_of(injection, seed),
        settings,
    )
