"""A run that fails several times, and goes on each time from what the method before made of it."""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from cpsr.benchmarks.harness.files import read_json, write_json, write_tensors
from cpsr.benchmarks.recovery.grid import HORIZON_SHARE, Point
from cpsr.benchmarks.recovery.guarded import guarded_state
from cpsr.benchmarks.recovery.jobs import Run
from cpsr.benchmarks.recovery.learning import learned, lesson
from cpsr.benchmarks.recovery.methods.roster import PREDICTORS, predictor_source, sees_the_run
from cpsr.benchmarks.recovery.predict import predicted_state
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import VALIDATION_ITERATIONS, CachedHistory, Trajectory
from cpsr.errors import ConfigError

__all__ = ["FailingRun", "failure_points", "follow", "recomputing_losses"]

WATCHED_ITERATIONS = 60  # after a predicted restart nothing is committed: as the product has it
_Array = NDArray[numpy.float64]


@dataclass(frozen=True)
class FailingRun:
    """One run, the iterations at which it fails, and the method that recovers it every time."""

    run: Run
    points: tuple[Point, ...]
    method: str


def failure_points(iterations: int, interval: int, count: int) -> tuple[Point, ...]:
    """`count` failures, spread evenly over a training of that many iterations, each late in its interval.

    Raises:
        ConfigError: they lie so close that no checkpoint would be committed between two of them, or so early that
            there is none before the first.
    """
    horizon = max(1, min(round(HORIZON_SHARE * interval), interval - 1))
    points: list[Point] = []
    for number in range(1, count + 1):
        fraction = number / (count + 1)
        checkpoint = round((iterations * fraction - horizon) / interval) * interval
        free = points[-1].failure + WATCHED_ITERATIONS if points else 1
        if checkpoint < free:
            raise ConfigError(
                f"{count} failures in {iterations} iterations leave no checkpoint between them, with one every "
                f"{interval} iterations and none in the {WATCHED_ITERATIONS} after a recovery: take fewer failures"
            )
        points.append(Point(interval, fraction, checkpoint, checkpoint + horizon))
    return tuple(points)


def follow(failing: FailingRun) -> dict[str, Any]:
    """Train the run from its first failure to its end, or read what was kept of that.

    Every recovery starts from the run's own checkpoints: those before the first failure are the fault-free run's,
    later ones descend from recovered states.

    Returns:
        `recoveries`: of each failure `checkpoint`, `failure`, `predicted` and `reason`. From the first failure on, as
        lists: `work` (iterations trained since the beginning, repeated ones counted again), `iterations` (where the
        training stood) and `losses` (validation, in nats). `losses` is None once training has diverged. `final_loss` in
        nats at the end, on more data, likewise.

    Raises:
        CPSRError: the cache is damaged.
    """
    trajectory = failing.run.trajectory()
    points = failing.points
    name = f"T{points[0].interval:03d}-n{len(points)}-{failing.method}-{predictor_source(failing.method)}"
    path = trajectory.directory / "failures" / f"{name}.json"
    found: dict[str, Any] | None = read_json(path)
    if found is None:
        directory = path.with_suffix("")
        shutil.rmtree(directory, ignore_errors=True)  # of a call that was interrupted
        course = _Course(trajectory, points[0], failing.method, directory)
        for point in points:
            course.train_to(point.failure)
            course.recover(point)
        course.train_to(trajectory.workload.iterations)
        course.end()
        found = course.record
        write_json(path, found)
        shutil.rmtree(directory, ignore_errors=True)
    return found


class _Course:
    """The run under way: its trainer, its checkpoints, and what its predictor has learned."""

    def __init__(self, trajectory: Trajectory, first: Point, method: str, directory: Path) -> None:
        self._trajectory = trajectory
        self._interval = first.interval
        self._method = method
        self._directory = directory
        self._trainer = trajectory.at(first.checkpoint)
        self._newest: State = self._trainer.state()
        self._fault_free_until = first.checkpoint
        self._checkpoints = list(range(first.interval, first.checkpoint + 1, first.interval))
        self._state = learned(method, trajectory, first.interval, first.checkpoint).state
        self._work = first.checkpoint
        self._commits_from = first.checkpoint
        self._measures = False  # before the first failure it is the fault-free run
        self.record: dict[str, Any] = {"recoveries": [], "work": [], "iterations": [], "losses": []}

    def train_to(self, iteration: int) -> None:
        """Go on; every interval a checkpoint."""
        while self._trainer.iteration < iteration:
            self._trainer.step()
            self._work += 1
            at = self._trainer.iteration
            if self._measures and at % VALIDATION_ITERATIONS == 0:
                self._measure()
            # A repeated iteration gives the checkpoint again that is there already.
            if at % self._interval == 0 and at >= self._commits_from and at > self._checkpoints[-1]:
                self._commit()

    def end(self) -> None:
        """Keep the final loss."""
        loss = float(self._trainer.final_losses().mean())
        self.record["final_loss"] = loss if math.isfinite(loss) else None

    def recover(self, point: Point) -> None:
        """Lose everything since the newest checkpoint, and go on from what the method makes of it."""
        predictor = PREDICTORS[self._method].predictor(self._interval)
        if self._state is not None:
            predictor.load_state_dict(self._state)
        workload = self._trajectory.workload
        asked = predictor, self._history(), workload, point.failure, self._newest
        guarded = PREDICTORS[self._method].guarded
        forecast, state = guarded_state(*asked, self._trainer) if guarded else predicted_state(*asked)
        if state is not None and not state.is_finite():
            state = None  # as the guard has it
        self._trainer.load(self._newest if state is None else state)
        self._commits_from = point.failure + (0 if state is None else WATCHED_ITERATIONS)
        self.record["recoveries"].append(
            {
                "checkpoint": self._newest.iteration,
                "failure": point.failure,
                "predicted": state is not None,
                "reason": forecast.reason,
            }
        )
        self._measures = True
        self._measure()

    def _commit(self) -> None:
        at = self._trainer.iteration
        self._newest = self._trainer.state()
        self._checkpoints.append(at)
        weights = {f"weights/{at}/{name}": values for name, values in self._newest.weights.items()}
        write_tensors(self._path_of(at), weights)
        if sees_the_run(self._method, self._interval):
            predictor, _ = lesson(PREDICTORS[self._method], self._interval, self._history(), self._state)
            self._state = predictor.state_dict()

    def _history(self) -> CachedHistory:
        return CachedHistory(self._trajectory.workload, self._path_of, self._checkpoints)

    def _path_of(self, iteration: int) -> Path:
        if iteration <= self._fault_free_until:
            return self._trajectory.path_of(iteration)
        return self._directory / f"{iteration:05d}.safetensors"

    def _measure(self) -> None:
        self.record["work"].append(self._work)
        self.record["iterations"].append(self._trainer.iteration)
        loss = float(self._trainer.validate().mean())
        self.record["losses"].append(loss if math.isfinite(loss) else None)


def recomputing_losses(work: _Array, points: tuple[Point, ...], iterations: _Array, losses: _Array) -> _Array:
    """Losses, at those amounts of work, of the run that fails at the same iterations and repeats what was lost.

    Args:
        work: iterations trained, repeated ones counted again.
        points: the failures, ascending.
        iterations: of the fault-free curve.
        losses: the fault-free curve's.
    """
    repeated = 0
    standing = numpy.array(work, dtype=numpy.float64)
    for point in points:
        standing -= point.horizon * (work >= point.failure + repeated)
        repeated += point.horizon
    return numpy.interp(standing, iterations, losses)
