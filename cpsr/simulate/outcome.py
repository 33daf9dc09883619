"""What the simulated runs came to: shares of the wall time, and how they spread over the runs."""

from dataclasses import dataclass
from typing import Any

import numpy

from cpsr.planner.inputs import Array
from cpsr.simulate.system import Job, System

__all__ = ["QUANTILES", "Outcome"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Outcome:
    """The wall time of every run, split without remainder.

    Attributes:
        system: simulated.
        job: simulated.
        useful_seconds: time of the iterations that the run has at its end, less the end costs.
        stall_seconds: of checkpoints, and waiting for a slot.
        lost_seconds: iterations that were rolled back or repeated, and the end costs.
        restart_seconds: restarts and predictions.
        waiting_seconds: until a failure was known and a replacement was there.
        failures: how many met each run.
    """

    system: System
    job: Job
    useful_seconds: Array
    stall_seconds: Array
    lost_seconds: Array
    restart_seconds: Array
    waiting_seconds: Array
    failures: Array

    @property
    def ettr(self) -> Array:
        """Effective training time ratio of each run: useful over wall time."""
        return self.useful_seconds / self.job.wall_seconds

    @property
    def cost_fraction(self) -> Array:
        """Fault-tolerance cost of each run as a share of the wall time: all that is not useful."""
        return 1 - self.ettr

    @property
    def goodput_per_second(self) -> Array:
        """Samples of useful iterations a second."""
        return self.ettr * self.job.samples_per_iteration / self.job.iteration_seconds

    def mean_and_error(self, values: Array) -> tuple[float, float]:
        """Mean over the runs and its Monte-Carlo standard error; 0 for a single run, which cannot show it."""
        error = float(values.std(ddof=1) / numpy.sqrt(values.size)) if values.size > 1 else 0.0
        return float(values.mean()), error

    def to_json(self) -> dict[str, Any]:
        """Plain data with units in the names."""
        ettr, error = self.mean_and_error(self.ettr)
        split = {
            "useful": self.useful_seconds,
            "stall": self.stall_seconds,
            "lost": self.lost_seconds,
            "restart": self.restart_seconds,
            "waiting": self.waiting_seconds,
        }
        return {
            "system": self.system.name,
            "note": self.system.note,
            "interval_iterations": self.system.checkpoints.interval_iterations,
            "runs": self.ettr.size,
            "failures_mean": float(self.failures.mean()),
            "ettr_mean": ettr,
            "ettr_standard_error": error,
            "ettr_quantiles": {str(q): float(numpy.quantile(self.ettr, q)) for q in QUANTILES},
            "goodput_samples_per_second_mean": float(self.goodput_per_second.mean()),
            "wall_time_fractions": {
                name: float(seconds.mean()) / self.job.wall_seconds for name, seconds in split.items()
            },
        }
