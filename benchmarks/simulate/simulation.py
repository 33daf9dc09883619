"""The simulation: a job, its failures, a system that brings it back from them, and runs from failure to failure."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from cpsr.planner.inputs import Array, RecoveryCost

__all__ = [
    "Checkpoints",
    "Failures",
    "Job",
    "LinearCost",
    "Outcome",
    "Recovery",
    "System",
    "simulate",
]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Job:
    """A training job, and what every failure costs it whoever recovers it.

    Attributes:
        iteration_seconds: of one iteration without checkpoints.
        wall_seconds: length of the simulated run, everything included.
        detection_seconds: from the failure until it is known.
        replacement_seconds: from then until a replacement is there.
        restart_seconds: from then until the state of a checkpoint is loaded and training may go on.
    """

    iteration_seconds: float
    wall_seconds: float
    detection_seconds: float = 0.0
    replacement_seconds: float = 0.0
    restart_seconds: float = 0.0


@dataclass(frozen=True)
class Failures:
    """Independent gaps, Weibull with this mean; a `shape` of 1 is Poisson, below 1 failures come in bursts."""

    mtbf_seconds: float
    shape: float = 1.0

    def gaps(self, runs: int, generator: numpy.random.Generator) -> Array:
        """Seconds until the next failure of each run."""
        return self.mtbf_seconds / math.gamma(1 + 1 / self.shape) * generator.weibull(self.shape, runs)


@dataclass(frozen=True)
class Checkpoints:
    """When checkpoints are taken and what they cost.

    One slot is enough for every planned interval, which is never shorter than the persist time: how many host buffers
    a running job has does not matter to it.

    Attributes:
        interval_iterations: between two of them, and from a restart to the first.
        stall_seconds: extra time of the training thread for each.
        persist_seconds: from the end of the stall until it is durable: only then can a failure go back to it.
        slots: how many may be on their way to the storage at once; training waits for one.
    """

    interval_iterations: int
    stall_seconds: float
    persist_seconds: float = 0.0
    slots: int = 1


class Resumption(NamedTuple):
    """Where training goes on after a failure, one value a run.

    Attributes:
        position_iterations: the iteration it goes on from.
        next_checkpoint_iterations: the iteration after which the next checkpoint is due.
        end_cost_iterations: how much of that stays missing, beyond what the checkpoint missed already.
        restart_seconds: time for this kind of recovery, on top of the job's own restart.
    """

    position_iterations: Array
    next_checkpoint_iterations: Array
    end_cost_iterations: Array
    restart_seconds: Array


@dataclass(frozen=True)
class Recovery:
    """All workers go back to the checkpoint, or the state at the failure is predicted.

    Attributes:
        cost: the end cost of a prediction by the distance from the checkpoint; None: all go back.
        seconds: to forecast, predict and inject.
        watch_iterations: no checkpoint begins in so many iterations after a predicted restart.
    """

    cost: RecoveryCost | None = None
    seconds: float = 0.0
    watch_iterations: int = 0

    def resume(self, position: Array, durable: Array, interval_iterations: int) -> Resumption:
        """At the last whole iteration before the failure, or at the checkpoint.

        Args:
            position: iterations at the failure, in part as well.
            durable: iteration of the newest durable checkpoint; 0 is the start of the job, where nothing is predicted.
            interval_iterations: between checkpoints.
        """
        none = numpy.zeros_like(position)
        if self.cost is None:
            return Resumption(durable, durable + interval_iterations, none, none)
        possible = durable > 0
        target = numpy.where(possible, numpy.floor(position), 0.0)
        cost = numpy.where(possible, self.cost.end_cost_iterations(target - durable, interval_iterations), none)
        due = target + numpy.maximum(interval_iterations, numpy.where(possible, self.watch_iterations, none))
        seconds = numpy.where(possible, self.seconds, none)
        return Resumption(target, due, cost, seconds)


@dataclass(frozen=True)
class LinearCost:
    """An end cost of `slope u` iterations, at a distance of u from the checkpoint; a `RecoveryCost`."""

    slope: float
    source: str = "configured"

    def end_cost_iterations(self, horizon_iterations: Array, interval_iterations: float | Array) -> Array:
        """Iterations that stay missing."""
        return numpy.asarray(self.slope * horizon_iterations)


@dataclass(frozen=True)
class System:
    """One way to live with failures."""

    name: str
    checkpoints: Checkpoints
    recovery: Recovery
    note: str = ""


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
            "wall_time_fractions": {
                name: float(seconds.mean()) / self.job.wall_seconds for name, seconds in split.items()
            },
        }


def simulate(job: Job, system: System, failures: Failures, runs: int = 1000, seed: int = 0) -> Outcome:
    """Run a job under failures many times.

    A failure during a recovery begins the recovery again. Systems simulated with the same seed and number of runs meet
    the same failures.
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, not {runs}")
    generator = numpy.random.default_rng(seed)
    state = _Runs(job, system, runs)
    failure = state.began + failures.gaps(runs, generator)
    while (struck := failure < job.wall_seconds).any():
        state.fail(failure, struck)
        # One draw for every run, struck or not: so all systems meet the same failures.
        failure = numpy.where(struck, state.began + failures.gaps(runs, generator), failure)
    return state.end()


class _Runs:
    """Each run since its last failure: first a recovery, then training."""

    def __init__(self, job: Job, system: System, runs: int) -> None:
        self._job, self._system = job, system
        self._stall, self._lost, self._restart, self._waiting, self._failures = (numpy.zeros(runs) for _ in range(5))
        # The recovery: waiting from `began` to `_replaced`, restarting to `_restarted`.
        self.began = self._replaced = self._restarted = numpy.zeros(runs)
        # The training after it: its first iteration, the checkpoint behind it, what of the two stays missing, and the
        # iteration after which the next checkpoint is due.
        self._position, self._durable, self._cost, self._durable_cost = (numpy.zeros(runs) for _ in range(4))
        self._due = numpy.full(runs, float(system.checkpoints.interval_iterations))

    def fail(self, at: Array, struck: NDArray[numpy.bool_]) -> None:
        """Let the runs that were struck fail at those times, and begin their recovery."""
        job, checkpoints = self._job, self._system.checkpoints
        reached = self._spend(at, struck)
        durable_cost = numpy.where(reached.durable_iterations > self._durable, self._cost, self._durable_cost)
        position, durable = reached.position_iterations, reached.durable_iterations
        interval = checkpoints.interval_iterations
        next_ = self._system.recovery.resume(position, durable, interval)
        self._lost += struck * (position - next_.position_iterations) * job.iteration_seconds
        self._failures += struck
        replaced = at + job.detection_seconds + job.replacement_seconds
        restarted = replaced + job.restart_seconds + next_.restart_seconds
        self._keep(struck, began=at, _replaced=replaced, _restarted=restarted)
        self._keep(struck, _position=next_.position_iterations, _due=next_.next_checkpoint_iterations)
        self._keep(struck, _durable=durable, _durable_cost=durable_cost, _cost=durable_cost + next_.end_cost_iterations)

    def end(self) -> Outcome:
        """Run all to the end of the wall time."""
        wall = numpy.full(self._lost.shape, self._job.wall_seconds)
        reached = self._spend(wall, numpy.ones(wall.shape, dtype=bool))
        missing = self._cost * self._job.iteration_seconds
        return Outcome(
            system=self._system,
            job=self._job,
            useful_seconds=reached.position_iterations * self._job.iteration_seconds - missing,
            stall_seconds=self._stall,
            lost_seconds=self._lost + missing,
            restart_seconds=self._restart,
            waiting_seconds=self._waiting,
            failures=self._failures,
        )

    def _spend(self, until: Array, which: NDArray[numpy.bool_]) -> "_Reach":
        """Book the time of some runs since their last failure; returns where all would be then."""
        # Runs that are not meant may have no next failure at all.
        until = numpy.minimum(until, self._job.wall_seconds)
        self._waiting += which * numpy.maximum(numpy.minimum(until, self._replaced) - self.began, 0.0)
        self._restart += which * numpy.maximum(numpy.minimum(until, self._restarted) - self._replaced, 0.0)
        trained = numpy.maximum(until - self._restarted, 0.0)
        iteration_seconds = self._job.iteration_seconds
        checkpoints = self._system.checkpoints
        reached = _reach(checkpoints, iteration_seconds, self._position, self._durable, self._due, trained)
        self._stall += which * reached.stalled_seconds
        return reached

    def _keep(self, which: NDArray[numpy.bool_], **values: Array) -> None:
        for name, value in values.items():
            setattr(self, name, numpy.where(which, value, getattr(self, name)))


@dataclass(frozen=True)
class _Reach:
    """The state of each run after some seconds of training.

    Attributes:
        position_iterations: done, in part as well.
        durable_iterations: newest durable checkpoint; the one given where none became durable.
        stalled_seconds: time in stalls, and waiting for a slot.
    """

    position_iterations: Array
    durable_iterations: Array
    stalled_seconds: Array


def _reach(
    checkpoints: Checkpoints, iteration_seconds: float, start: Array, durable: Array, first: Array, seconds: Array
) -> _Reach:
    """Train for `seconds` from iteration `start`.

    A checkpoint on its way to the storage when this begins was lost with the failure before.

    Args:
        checkpoints: interval, stall, persist time.
        iteration_seconds: of one iteration.
        start: iteration of each run, a whole number.
        durable: newest durable checkpoint of each run, at most `start`.
        first: iteration after which the first checkpoint of each run is begun, later than `start`.
        seconds: of each run, at least 0.
    """
    interval, stall_seconds = checkpoints.interval_iterations, checkpoints.stall_seconds
    after_first = seconds - (first - start) * iteration_seconds
    count, since = _started(checkpoints, iteration_seconds, after_first)
    moved = numpy.clip((since - stall_seconds) / iteration_seconds, 0.0, interval)
    position = numpy.where(count > 0, first + (count - 1) * interval + moved, start + seconds / iteration_seconds)
    done, _ = _started(checkpoints, iteration_seconds, after_first - stall_seconds - checkpoints.persist_seconds)
    trained = (position - start) * iteration_seconds
    return _Reach(
        position,
        numpy.where(done > 0, first + (done - 1) * interval, durable),
        numpy.maximum(seconds - trained, 0.0),
    )


def _started(checkpoints: Checkpoints, iteration_seconds: float, seconds: Array) -> tuple[Array, Array]:
    """How many checkpoints have started so long after the first, and the seconds since the newest of them did.

    `slots` start in a row, then training waits until the first is durable. Let c be the time between two starts that
    nothing delays, and d that until a checkpoint is durable. Start j is `max(start[j-1] + c, start[j-slots] + d)`: that
    is `(j mod slots) c + (j div slots) max(slots c, d)`. Before the first they are 0 and `seconds`.
    """
    slots, stall_seconds = checkpoints.slots, checkpoints.stall_seconds
    spacing_seconds = checkpoints.interval_iterations * iteration_seconds + stall_seconds
    round_seconds = max(slots * spacing_seconds, stall_seconds + checkpoints.persist_seconds)
    rounds = numpy.floor(seconds / round_seconds)
    rest = seconds - rounds * round_seconds
    in_round = numpy.minimum(numpy.floor(rest / spacing_seconds), slots - 1)
    count = numpy.where(seconds < 0, 0.0, rounds * slots + in_round + 1)
    return count, numpy.where(seconds < 0, seconds, rest - in_round * spacing_seconds)
