"""One failure, and what each way to come back from it cost; every result is a file."""

import math
import statistics
import time
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import xxhash

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.recovery.form import (
    Formed,
    form_checkfree,
    form_doubled,
    form_moved,
    form_placebo,
    form_predicted,
    form_scar,
    form_truth,
    form_twin,
)
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.lost import lost_part
from cpsr.benchmarks.recovery.methods import (
    CHECKFREE,
    DOUBLED,
    MOVED,
    ORACLE,
    PLACEBO,
    RECOMPUTE,
    SCAR,
    TWIN,
    predictors_digest,
)
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import IterationWorth, end_cost_iterations

__all__ = ["Outcome", "PointMeasurement"]


@dataclass(frozen=True)
class Outcome:
    """What one method's recovery from one failure cost.

    Attributes:
        method: its name.
        seed: of the training run.
        point: the failure.
        predicted: False where the method advises against itself, or recomputes: the cost is then the horizon.
        reason: one sentence of the predictor, or why training diverged.
        final_gap_nats: final loss over that of the run that never failed; None where training diverged.
        repeated_iterations: trained again because of the failure.
        end_cost_iterations: both together, in iterations; None where training diverged.
        recover_iterations: opening the history, loading what was learned, forecasting, predicting and injecting, in
            training iterations; None where nothing was run.
        learning_seconds: spent at the checkpoints before, on learning.
    """

    method: str
    seed: int
    point: Point
    predicted: bool
    reason: str
    final_gap_nats: float | None
    repeated_iterations: int
    end_cost_iterations: float | None = None
    recover_iterations: float | None = None
    learning_seconds: float = 0.0


class PointMeasurement:
    """Measures methods at one failure point of a trajectory that is whole already.

    What a method forms is remembered under its name and the predictors' source. What a recovery cost is remembered
    under the exact state that it began with, whichever method formed it. A changed predictor is thus formed anew, and
    trained anew only where it predicts something else.

    Args:
        trajectory: the run that fails.
        point: where it fails.
        worth: of an iteration of the workload.
    """

    def __init__(self, trajectory: Trajectory, point: Point, worth: IterationWorth) -> None:
        self._trajectory = trajectory
        self._point = point
        self._worth = worth
        part = "" if point.lost == "all" else f"-lost-{point.lost.replace('/', '-')}"
        self._directory = trajectory.directory / "points" / f"T{point.interval:03d}-f{point.failure:05d}{part}"
        self._formed: tuple[str | None, State | None] = None, None  # the newest, with its key

    def outcome(self, method: str) -> Outcome:
        """Measure a method, or read what was measured before.

        Raises:
            CPSRError: the cache is damaged, or the machine does not compute the same twice.
        """
        point = self._point
        recomputed = Outcome(
            method,
            self._trajectory.seed,
            point,
            predicted=False,
            reason="exact, by definition",
            final_gap_nats=0.0,
            repeated_iterations=point.horizon,
            end_cost_iterations=float(point.horizon),
        )
        if method == RECOMPUTE:
            return recomputed
        formed = read_json(self._formed_path(method)) or self._form(method)
        declined = replace(recomputed, reason=formed["reason"], learning_seconds=formed["learning_seconds"])
        if formed["state"] is None:
            return declined
        followed = self._followed(method, formed["state"])
        gap, repeated = followed["final_gap_nats"], point.horizon if method == MOVED else 0
        return replace(
            declined,
            predicted=True,
            reason="training diverged after the recovery" if gap is None else declined.reason,
            final_gap_nats=gap,
            repeated_iterations=repeated,
            end_cost_iterations=None if gap is None else end_cost_iterations(gap, self._worth, repeated),
            recover_iterations=formed["seconds"] / followed["step_seconds"],
        )

    def _formed_path(self, method: str) -> Path:
        return self._directory / f"formed-{method}-{predictors_digest()}.json"

    def _form(self, method: str) -> dict[str, Any]:
        formed = self._formed_by(method)
        key = None if formed.state is None else _key(formed.state)
        self._formed = key, formed.state
        record = {field.name: getattr(formed, field.name) for field in fields(formed)} | {"state": key}
        write_json(self._formed_path(method), record)
        return record

    def _formed_by(self, method: str) -> Formed:
        """The state that a method goes on from: its own where something was lost, and exact elsewhere."""
        trajectory, point = self._trajectory, self._point
        failure, checkpoint = self._failure, self._checkpoint
        part = lost_part(point.lost, failure, point.checkpoint // point.interval)
        ways = {
            ORACLE: lambda: form_truth(failure),
            MOVED: lambda: form_moved(trajectory, point, checkpoint, failure),
            TWIN: lambda: form_twin(trajectory, point, checkpoint),
            DOUBLED: lambda: form_doubled(failure),
            PLACEBO: lambda: form_placebo(trajectory, point, checkpoint),
            SCAR: lambda: form_scar(trajectory, point),
            CHECKFREE: lambda: form_checkfree(failure, part.spans),
        }
        if method not in ways:
            return form_predicted(method, trajectory, point, checkpoint, part)
        formed = ways[method]()
        return formed if formed.state is None else replace(formed, state=part.complete(formed.state))

    def _followed(self, method: str, key: str) -> dict[str, Any]:
        """What came of the training after the state of that key."""
        path = self._directory / f"followed-{key}.json"
        found: dict[str, Any] | None = read_json(path)
        if found is None:
            found = self._train(self._state(method, key))
            write_json(path, found)
        if method == ORACLE and found["final_gap_nats"] != 0.0:
            raise CPSRError(
                f"the true state at the failure did not give the fault-free losses again ({self._directory}): nothing "
                "measured here is paired; try one thread (OMP_NUM_THREADS=1), in a new --cache"
            )
        return found

    def _state(self, method: str, key: str) -> State:
        """The state of that key: the one just formed, or formed again where the call before was interrupted."""
        if self._formed[0] != key:
            self._form(method)
        found, state = self._formed
        if state is None or found != key:
            raise CPSRError(f"'{method}' predicted two different states for the same failure in {self._directory}")
        return state

    def _train(self, state: State) -> dict[str, Any]:
        trainer = self._trajectory.trainer()
        trainer.load(state)
        seconds = []
        while trainer.iteration < self._trajectory.workload.iterations:
            started = time.perf_counter()
            trainer.step()
            seconds.append(time.perf_counter() - started)
        gap = float(numpy.mean(trainer.final_losses() - self._trajectory.final_losses()))
        return {"final_gap_nats": gap if math.isfinite(gap) else None, "step_seconds": statistics.median(seconds)}

    @cached_property
    def _checkpoint(self) -> State:
        """The fault-free run at the checkpoint."""
        return self._trajectory.at(self._point.checkpoint).state()

    @cached_property
    def _failure(self) -> State:
        """The fault-free run at the failure."""
        trainer = self._trajectory.trainer()
        trainer.load(self._checkpoint)
        self._trajectory.advance(trainer, self._point.failure)
        return trainer.state()


def _key(state: State) -> str:
    """Of all that decides what follows after a state, in one trajectory, to its end."""
    return xxhash.xxh3_128(state.digest().encode()).hexdigest()
