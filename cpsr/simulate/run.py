"""The simulation: all runs at once, from failure to failure."""

import numpy
from numpy.typing import NDArray

from cpsr.planner.inputs import Array
from cpsr.simulate.arrivals import Arrivals, Stream
from cpsr.simulate.life import Reach, reach
from cpsr.simulate.outcome import Outcome
from cpsr.simulate.system import Job, System

__all__ = ["simulate"]


def simulate(job: Job, system: System, arrivals: Arrivals, runs: int = 1000, seed: int = 0) -> Outcome:
    """Run a job under failures many times.

    A failure during a recovery begins the recovery again. Systems simulated with the same seed and number of runs meet
    the same failures.

    Args:
        job: what is trained, and what a failure costs in any case.
        system: its checkpoints and its way back.
        arrivals: of failures.
        runs: simulated side by side.
        seed: of all that is drawn.
    """
    if runs < 1:
        raise ValueError(f"runs must be at least 1, not {runs}")
    stream = arrivals.stream(runs, numpy.random.default_rng(seed))
    state = _Runs(job, system, stream, runs)
    failure = stream.after(state.available)
    while (struck := failure < job.wall_seconds).any():
        state.fail(failure, struck)
        failure = numpy.where(struck, stream.after(state.available), failure)
    return state.end()


class _Runs:
    """Each run since its last failure: first a recovery, then training."""

    def __init__(self, job: Job, system: System, stream: Stream, runs: int) -> None:
        self._job, self._system, self._stream = job, system, stream
        self._stall, self._lost, self._restart, self._waiting, self._failures = (numpy.zeros(runs) for _ in range(5))
        # The recovery: waiting from `began` to `replaced`, restarting to `restarted`, repeating to `resumed`.
        self._began = numpy.zeros(runs)
        self.available = stream.capacity_at(self._began)
        self._replaced = self._restarted = self._resumed = self.available
        # The training after it: its first iteration, the checkpoint behind it, what of the two stays missing, the
        # iteration after which a lead is had, and the one after which the next checkpoint is due.
        self._position, self._durable, self._cost, self._durable_cost, self._lead = (
            numpy.zeros(runs) for _ in range(5)
        )
        self._due = numpy.full(runs, float(system.checkpoints.interval_iterations))

    def fail(self, at: Array, struck: NDArray[numpy.bool_]) -> None:
        """Let the runs that were struck fail at those times, and begin their recovery."""
        job, checkpoints = self._job, self._system.checkpoints
        reached = self._spend(at, struck)
        durable_cost = numpy.where(reached.durable_iterations > self._durable, self._had(reached), self._durable_cost)
        position, durable = reached.position_iterations, reached.durable_iterations
        interval = checkpoints.interval_iterations
        next_ = self._system.recovery.resume(position, durable, interval, job.iteration_seconds)
        self._lost += struck * (position - next_.position_iterations) * job.iteration_seconds
        self._failures += struck
        available = self._stream.capacity_at(at)
        replaced = available + job.detection_seconds + job.replacement_seconds
        restarted = replaced + job.restart_seconds + next_.restart_seconds
        self._keep(struck, _began=at, available=available, _replaced=replaced, _restarted=restarted)
        self._keep(struck, _resumed=restarted + next_.replay_seconds, _position=next_.position_iterations)
        self._keep(struck, _due=next_.next_checkpoint_iterations, _lead=next_.lead_iterations)
        self._keep(struck, _durable=durable, _durable_cost=durable_cost, _cost=durable_cost + next_.end_cost_iterations)

    def end(self) -> Outcome:
        """Run all to the end of the wall time."""
        wall = numpy.full(self._lost.shape, self._job.wall_seconds)
        reached = self._spend(wall, numpy.ones(wall.shape, dtype=bool))
        missing = self._had(reached) * self._job.iteration_seconds
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

    def _had(self, reached: Reach) -> Array:
        """What stays missing after the training since the last failure, which may have been too short to lead."""
        early = reached.position_iterations < self._lead
        return numpy.where(early, numpy.maximum(self._cost, self._durable_cost), self._cost)

    def _spend(self, until: Array, which: NDArray[numpy.bool_]) -> Reach:
        """Book the time of some runs since their last failure; returns where all would be then."""
        # Runs that are not meant may have no next failure at all.
        until = numpy.minimum(until, self._job.wall_seconds)
        self._waiting += which * numpy.maximum(numpy.minimum(until, self._replaced) - self._began, 0.0)
        self._restart += which * numpy.maximum(numpy.minimum(until, self._restarted) - self._replaced, 0.0)
        self._lost += which * numpy.maximum(numpy.minimum(until, self._resumed) - self._restarted, 0.0)
        trained = numpy.maximum(until - self._resumed, 0.0)
        iteration_seconds = self._job.iteration_seconds
        checkpoints = self._system.checkpoints
        reached = reach(checkpoints, iteration_seconds, self._position, self._durable, self._due, trained)
        self._stall += which * reached.stalled_seconds
        return reached

    def _keep(self, which: NDArray[numpy.bool_], **values: Array) -> None:
        for name, value in values.items():
            setattr(self, name, numpy.where(which, value, getattr(self, name)))
