"""What one way to come back from one failure cost; every result is a file."""

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.methods import MOVED, ORACLE, RECOMPUTE, Failure, form, predictors_digest
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.errors import CPSRError
from cpsr.fitter.end_cost import IterationWorth, end_cost_iterations

__all__ = ["Outcome", "outcomes_at"]


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


def outcomes_at(trajectory: Trajectory, point: Point, methods: tuple[str, ...], worth: IterationWorth) -> list[Outcome]:
    """Measure methods at one failure, or read what was measured before with the same predictors.

    Args:
        trajectory: the run that fails.
        point: where it fails.
        methods: their names.
        worth: of an iteration of the workload.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    failure = Failure(trajectory, point)
    return [_outcome(failure, method, worth) for method in methods]


def _outcome(failure: Failure, method: str, worth: IterationWorth) -> Outcome:
    point, seed = failure.point, failure.trajectory.seed
    exact, horizon = "exact, by definition", float(point.horizon)
    recomputed = Outcome(method, seed, point, False, exact, 0.0, point.horizon, horizon)
    if method == RECOMPUTE:
        return recomputed
    part = "" if point.lost == "all" else f"-lost-{point.lost.replace('/', '-')}"
    folder = failure.trajectory.directory / "points" / f"T{point.interval:03d}-f{point.failure:05d}{part}"
    path = folder / f"{method}-{predictors_digest()}.json"
    found = read_json(path)
    if found is None:
        found = _measured(failure, method)
        write_json(path, found)
    declined = replace(recomputed, reason=found["reason"], learning_seconds=found["learning_seconds"])
    if not found["formed"]:
        return declined
    gap, repeated = found["final_gap_nats"], point.horizon if method == MOVED else 0
    if method == ORACLE and gap != 0.0:
        raise CPSRError(
            f"the true state at the failure did not give the fault-free losses again ({folder}): nothing measured here "
            "is paired; try one thread (OMP_NUM_THREADS=1), in a new --cache"
        )
    return replace(
        declined,
        predicted=True,
        reason="training diverged after the recovery" if gap is None else declined.reason,
        final_gap_nats=gap,
        repeated_iterations=repeated,
        end_cost_iterations=None if gap is None else end_cost_iterations(gap, worth, repeated),
        recover_iterations=found["seconds"] / found["step_seconds"],
    )


def _measured(failure: Failure, method: str) -> dict[str, Any]:
    formed = form(method, failure)
    found = {"reason": formed.reason, "seconds": formed.seconds, "learning_seconds": formed.learning_seconds}
    if formed.state is None:
        return {**found, "formed": False}
    trainer, seconds = failure.trajectory.trainer(), []
    trainer.load(formed.state)
    while trainer.iteration < failure.trajectory.workload.iterations:
        started = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - started)
    gap = float(numpy.mean(trainer.final_losses() - failure.trajectory.final_losses()))
    return {
        **found,
        "formed": True,
        "final_gap_nats": gap if math.isfinite(gap) else None,
        "step_seconds": statistics.median(seconds),
    }
