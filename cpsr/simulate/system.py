"""What is simulated: a job, and a system that takes its checkpoints and brings it back."""

from dataclasses import dataclass
from typing import Literal

import numpy

from cpsr.planner.inputs import Array, RecoveryCost

__all__ = ["Checkpoints", "Job", "LinearCost", "Prediction", "Recovery", "Replay", "Resumption", "Rollback", "System"]


@dataclass(frozen=True)
class Job:
    """A training job, and what every failure costs it whoever recovers it.

    Attributes:
        iteration_seconds: of one iteration without checkpoints.
        wall_seconds: length of the simulated run, everything included.
        detection_seconds: from the failure until it is known.
        replacement_seconds: from then until a replacement is there.
        restart_seconds: from then until the state of a checkpoint is loaded and training may go on.
        samples_per_iteration: for goodput in samples; 1 gives it in iterations.
    """

    iteration_seconds: float
    wall_seconds: float
    detection_seconds: float = 0.0
    replacement_seconds: float = 0.0
    restart_seconds: float = 0.0
    samples_per_iteration: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(iteration_seconds=self.iteration_seconds, wall_seconds=self.wall_seconds)
        _require_not_negative(
            detection_seconds=self.detection_seconds,
            replacement_seconds=self.replacement_seconds,
            restart_seconds=self.restart_seconds,
        )


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are taken and what they cost.

    One slot is enough for every planned interval, which is never shorter than the persist time: how many host buffers
    a running job has does not matter to it.

    Attributes:
        interval_iterations: between two of them, and from a restart to the first.
        stall_seconds: extra time of the training thread for each.
        persist_seconds: from the end of the stall until it is durable: only then can a failure go back to it.
        slots: how many may be on their way to the storage at once.
        contention: what happens to one that is due while all slots are taken: training waits, or it is skipped.
    """

    interval_iterations: int
    stall_seconds: float
    persist_seconds: float = 0.0
    slots: int = 1
    contention: Literal["wait", "skip"] = "wait"

    def __post_init__(self) -> None:
        _require_positive(interval_iterations=self.interval_iterations, slots=self.slots)
        _require_not_negative(stall_seconds=self.stall_seconds, persist_seconds=self.persist_seconds)
        if self.contention == "skip" and self.slots != 1:
            raise ValueError(f"skipping is simulated for one slot only, not for {self.slots}; take contention: wait")


@dataclass(frozen=True)
class Resumption:
    """Where training goes on after a failure, one value a run.

    Attributes:
        position_iterations: the iteration it goes on from.
        next_checkpoint_iterations: the iteration after which the next checkpoint is due.
        lead_iterations: the iteration after which an end cost below zero is had; a failure before loses it.
        end_cost_iterations: how much of that stays missing, beyond what the checkpoint missed already.
        restart_seconds: time for this kind of recovery, on top of the job's own restart.
        replay_seconds: time in which lost iterations are repeated before training goes on.
    """

    position_iterations: Array
    next_checkpoint_iterations: Array
    lead_iterations: Array
    end_cost_iterations: Array
    restart_seconds: Array
    replay_seconds: Array


@dataclass(frozen=True)
class Rollback:
    """All workers go back to the checkpoint and train on from there."""

    def resume(self, position: Array, durable: Array, interval_iterations: int, iteration_seconds: float) -> Resumption:
        """At the newest durable checkpoint.

        Args:
            position: iterations at the failure, in part as well.
            durable: iteration of the newest durable checkpoint; 0 is the start of the job.
            interval_iterations: between checkpoints.
            iteration_seconds: of one iteration.
        """
        none = numpy.zeros_like(position)
        return Resumption(durable, durable + interval_iterations, durable, none, none, none)


@dataclass(frozen=True)
class Replay:
    """Only the failed workers go back, the others wait for them (moevement, sections 3.4 and 3.6).

    Attributes:
        conversion_iterations: repeated on top of what was lost, to make a dense state of a window of sparse snapshots.
        time_fraction: time of a repeated iteration over that of a trained one.
    """

    conversion_iterations: int = 0
    time_fraction: float = 1.0

    def __post_init__(self) -> None:
        _require_not_negative(conversion_iterations=self.conversion_iterations)
        _require_positive(time_fraction=self.time_fraction)

    def resume(self, position: Array, durable: Array, interval_iterations: int, iteration_seconds: float) -> Resumption:
        """At the iteration that failed, after the replay; see `Rollback.resume` for the arguments."""
        # Before the first window is complete there is nothing to convert: everything is repeated from the start.
        conversion = numpy.where(durable > 0, float(self.conversion_iterations), 0.0)
        replay = (position - durable + conversion) * iteration_seconds * self.time_fraction
        none = numpy.zeros_like(position)
        # The others wait where they are, and keep to the multiples of the interval.
        due = (numpy.floor(position / interval_iterations) + 1) * interval_iterations
        return Resumption(position, due, position, none, none, replay)


@dataclass(frozen=True)
class Prediction:
    """The state at the failure is predicted; without any checkpoint the job starts again.

    Attributes:
        cost: the end cost by the distance from the checkpoint.
        seconds: to forecast, predict and inject.
        watch_iterations: after it, in which no checkpoint is begun.
        lead_after_iterations: after it, before an end cost below zero is had.
    """

    cost: RecoveryCost
    seconds: float = 0.0
    watch_iterations: int = 0
    lead_after_iterations: int = 0

    def __post_init__(self) -> None:
        _require_not_negative(
            seconds=self.seconds,
            watch_iterations=self.watch_iterations,
            lead_after_iterations=self.lead_after_iterations,
        )

    def resume(self, position: Array, durable: Array, interval_iterations: int, iteration_seconds: float) -> Resumption:
        """At the last whole iteration before the failure; see `Rollback.resume` for the arguments."""
        possible = durable > 0
        target = numpy.where(possible, numpy.floor(position), 0.0)
        horizon = target - durable
        cost = numpy.where(possible, self.cost.end_cost_iterations(horizon, interval_iterations), 0.0)
        seconds = numpy.where(possible, self.seconds, 0.0)
        watched = numpy.where(possible, float(self.watch_iterations), 0.0)
        due = target + numpy.maximum(interval_iterations, watched)
        return Resumption(target, due, target + self.lead_after_iterations, cost, seconds, numpy.zeros_like(position))


Recovery = Rollback | Replay | Prediction


@dataclass(frozen=True)
class LinearCost:
    """An end cost of `slope u - lead` iterations, at a distance of u from the checkpoint; a `RecoveryCost`."""

    slope: float
    lead_iterations: float = 0.0
    source: str = "configured"

    def end_cost_iterations(self, horizon_iterations: Array, interval_iterations: float | Array) -> Array:
        """Iterations that stay missing; no lead where nothing was lost, since nothing is predicted then."""
        cost = self.slope * horizon_iterations - self.lead_iterations
        return numpy.where(horizon_iterations > 0, cost, 0.0)


@dataclass(frozen=True)
class System:
    """One way to live with failures."""

    name: str
    checkpoints: Checkpoints
    recovery: Recovery
    note: str = ""


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < numpy.inf:
            raise ValueError(f"{name} must be positive and finite, not {value}")


def _require_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < numpy.inf:
            raise ValueError(f"{name} must be finite and not negative, not {value}")
