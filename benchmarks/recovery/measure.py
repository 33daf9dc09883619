"""One failure, and what each way to come back from it cost; every result is a file."""

import math
import statistics
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import xxhash

import cpsr.fitter
from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.recovery.form import MOVES_AS, Formed, form, form_moved, form_truth
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.methods.roster import (
    HARNESS_VERSION,
    MOVED,
    ORACLE,
    RECOMPUTE,
    predictor_source,
)
from cpsr.benchmarks.recovery.sources import files_digest, package_files
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import VALIDATION_ITERATIONS, Trajectory
from cpsr.errors import CPSRError
from cpsr.fitter.curve import LossCurve
from cpsr.fitter.lag import LagBeyondError, persistent_lag, transient

__all__ = ["MEASURED_ITERATIONS", "Outcome", "PointMeasurement", "needed_until"]

MEASURED_ITERATIONS = 160  # after the failure: the end of the window in which the lag is taken
MAX_LAG_ITERATIONS = 200  # the largest lag looked for, and twice the horizon where that is more


@dataclass(frozen=True)
class Outcome:
    """What one method's recovery from one failure cost.

    Attributes:
        method: its name.
        seed: of the training run.
        point: the failure.
        predicted: False where the method advises against itself, or recomputes: the cost is then the horizon.
        reason: one sentence of the predictor, or why no lag can be determined.
        lag_iterations: persistent lag; None where it cannot be determined.
        beyond: the lag lies beyond what is looked for, and is counted as the bound: it is at least as far from zero.
        recover_seconds: opening the history, loading what was learned, forecasting, predicting and injecting; None for
            recomputing.
        learning_seconds: spent at the checkpoints before, on learning; None for recomputing.
        accuracy: the predictor's own scores of itself, where it keeps any.
        settings: of the forecast.
        curve: what was measured after the recovery (see `_figures`); None where nothing was run.
    """

    method: str
    seed: int
    point: Point
    predicted: bool
    reason: str
    lag_iterations: float | None
    beyond: bool = False
    recover_seconds: float | None = None
    learning_seconds: float | None = None
    accuracy: list[dict[str, Any]] | None = None
    settings: dict[str, Any] | None = None
    curve: dict[str, Any] | None = None


class PointMeasurement:
    """Measures methods at one failure point of a trajectory that reaches `needed_until` already.

    What a method predicts is remembered under its name and its predictor's source. What a recovery cost is remembered
    under the exact state that it began with, whichever method formed it. A changed predictor is thus formed anew, and
    trained anew only where it predicts something else.

    Args:
        trajectory: the run that fails.
        point: where it fails.
    """

    def __init__(self, trajectory: Trajectory, point: Point) -> None:
        self._trajectory = trajectory
        self._point = point
        self._directory = trajectory.directory / "points" / f"T{point.interval:03d}-f{point.failure:05d}"
        self._formed: tuple[str | None, State | None] = None, None  # the newest, with its key

    def outcome(self, method: str) -> Outcome:
        """Measure a method, or read what was measured before.

        Raises:
            CPSRError: the cache is damaged, or the machine does not compute the same twice.
        """
        point = self._point
        outcome = Outcome(method, self._trajectory.seed, point, False, "exact, by definition", float(point.horizon))
        if method == RECOMPUTE:
            return outcome
        formed = read_json(self._formed_path(method)) or self._form(method)
        outcome = replace(
            outcome,
            reason=formed["reason"],
            recover_seconds=formed["seconds"],
            learning_seconds=formed["learning_seconds"],
            accuracy=formed["accuracy"],
            settings=formed["settings"],
        )
        if formed["state"] is None:
            return outcome
        curve = self._curve(method, formed["state"])
        lag = curve["beyond"] if curve["lag"] is None else curve["lag"]["iterations"]
        return replace(
            outcome,
            predicted=True,
            reason=curve["obstacle"] or outcome.reason,
            lag_iterations=None if lag is None else lag + _recomputed(method, point),
            beyond=curve["beyond"] is not None,
            curve=curve,
        )

    def _formed_path(self, method: str) -> Path:
        source = f"harness{HARNESS_VERSION}" if method == ORACLE else predictor_source(_made_by(method))
        return self._directory / f"formed-{method}-{source}.json"

    def _form(self, method: str) -> dict[str, Any]:
        formed = self._formed_by(method)
        key = None if formed.state is None else _curve_key(formed.state)
        self._formed = key, formed.state
        record = {field.name: getattr(formed, field.name) for field in fields(formed)} | {"state": key}
        write_json(self._formed_path(method), record)
        return record

    def _formed_by(self, method: str) -> Formed:
        if method == ORACLE:
            return form_truth(self._trajectory, self._failure[0])
        if method == MOVED:
            return form_moved(self._trajectory, self._point, self._checkpoint, self._failure[0])
        return form(method, self._trajectory, self._point, self._checkpoint)

    def _curve(self, method: str, key: str) -> dict[str, Any]:
        """What followed after the state of that key, with figures by the present fitter."""
        path = self._directory / f"curve-{key}.json"
        curve = read_json(path)
        if curve is None:
            curve = self._train(self._state(method, key))
            write_json(path, curve)
        source = files_digest(package_files(cpsr.fitter))
        if curve.get("fitter") != source:
            curve |= {"fitter": source} | _figures(curve, self._fault_free(curve), self._point)
            write_json(path, curve)
        if method == ORACLE:
            _check_oracle(curve, self._directory)
        found: dict[str, Any] = curve
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
        iterations, losses, seconds = [trainer.iteration], [trainer.validate().tolist()], []
        while trainer.iteration < self._point.failure + MEASURED_ITERATIONS:
            started = time.perf_counter()
            trainer.step()
            seconds.append(time.perf_counter() - started)
            if trainer.iteration % VALIDATION_ITERATIONS == 0:
                iterations.append(trainer.iteration)
                losses.append(trainer.validate().tolist())
        finite = all(math.isfinite(loss) for row in losses for loss in row)
        return {
            "iterations": iterations,
            "losses": losses if finite else None,
            "step_seconds": statistics.median(seconds),
            "fault_free_at_failure": self._failure[1],
        }

    @cached_property
    def _checkpoint(self) -> State:
        """The fault-free run at the checkpoint."""
        return self._trajectory.at(self._point.checkpoint).state()

    @cached_property
    def _failure(self) -> tuple[State, list[float]]:
        """The fault-free run at the failure, with its validation losses there."""
        trainer = self._trajectory.trainer()
        trainer.load(self._checkpoint)
        self._trajectory.advance(trainer, self._point.failure)
        return trainer.state(), trainer.validate().tolist()

    def _fault_free(self, curve: dict[str, Any]) -> LossCurve:
        """Around the failure, with its losses at the failure itself."""
        failure = self._point.failure
        kept = self._trajectory.curve(failure - 2 * max_lag(self._point), needed_until(self._point))
        place = int(numpy.searchsorted(kept.iterations, failure))
        if kept.iterations[place] == failure:
            return kept
        iterations = numpy.insert(kept.iterations, place, failure)
        return LossCurve(iterations, numpy.insert(kept.losses, place, curve["fault_free_at_failure"], axis=0))


def _made_by(method: str) -> str:
    return MOVES_AS if method == MOVED else method


def _recomputed(method: str, point: Point) -> int:
    """Iterations that were trained again before the state that a method goes on from."""
    return point.horizon if method == MOVED else 0


def max_lag(point: Point) -> int:
    """The largest lag looked for, in iterations."""
    return max(MAX_LAG_ITERATIONS, 2 * point.horizon)


def needed_until(point: Point) -> int:
    """How far the fault-free run must be trained to measure a point: also a recovered run that is ahead is placed."""
    return point.failure + MEASURED_ITERATIONS + max_lag(point)


def _curve_key(state: State) -> str:
    """Of all that decides what follows after a state, in one trajectory."""
    return xxhash.xxh3_128(f"{state.digest()} {MEASURED_ITERATIONS} {VALIDATION_ITERATIONS}".encode()).hexdigest()


def _figures(curve: dict[str, Any], fault_free: LossCurve, point: Point) -> dict[str, Any]:
    """Lag and transient of a recovered curve, as plain data.

    Returns:
        `lag` and `transient` (fields of the fitter's), None where they cannot be determined, and `obstacle` why not.
        `beyond`: the bound in iterations, where the lag lies beyond what is looked for, else None.
        `after`: iterations since the failure. `gaps_nats`: the paired gap there. `below_recompute`: the share of
        them at which the loss was below that of recomputing after as many iterations.
    """
    nothing: dict[str, Any] = {
        "lag": None,
        "beyond": None,
        "transient": None,
        "after": [],
        "gaps_nats": [],
        "below_recompute": None,
    }
    if curve["losses"] is None:
        return nothing | {"obstacle": "training diverged after the recovery: a validation loss is not finite"}
    recovered = LossCurve(numpy.array(curve["iterations"]), numpy.array(curve["losses"]))
    mean = recovered.losses.mean(axis=1)
    recomputing = numpy.interp(
        recovered.iterations - point.horizon, fault_free.iterations, fault_free.losses.mean(axis=1)
    )
    figures = nothing | {
        "obstacle": None,
        "transient": asdict(transient(recovered, fault_free, point.failure)),
        "after": (recovered.iterations - point.failure).tolist(),
        "gaps_nats": (mean - fault_free.at(recovered.iterations).mean(axis=1)).tolist(),
        "below_recompute": float(numpy.mean(mean < recomputing)),
    }
    try:
        lag = persistent_lag(recovered, fault_free, point.failure, max_lag_iterations=max_lag(point))
    except LagBeyondError as error:
        return figures | {"beyond": error.bound_iterations, "obstacle": f"counted as the bound: {error}"}
    except ValueError as error:
        return figures | {"obstacle": f"no lag can be determined: {error}"}
    return figures | {"lag": asdict(lag) | {"window": list(lag.window)}}


def _check_oracle(curve: dict[str, Any], directory: Path) -> None:
    if any(gap != 0.0 for gap in curve["gaps_nats"]):
        raise CPSRError(
            f"the true state at the failure did not give the fault-free losses again ({directory}): nothing measured "
            "here is paired; try one thread (OMP_NUM_THREADS=1), in a new --cache"
        )
