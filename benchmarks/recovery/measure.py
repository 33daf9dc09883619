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
from cpsr.benchmarks.recovery.form import (
    MOVES_AS,
    Formed,
    form,
    form_checkfree,
    form_doubled,
    form_moved,
    form_placebo,
    form_scar,
    form_truth,
    form_twin,
    form_weights_only,
)
from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.lost import lost_part
from cpsr.benchmarks.recovery.methods.roster import (
    CHECKFREE,
    DOUBLED,
    HARNESS_VERSION,
    MOVED,
    ORACLE,
    PLACEBO,
    PREDICTORS,
    RECOMPUTE,
    SCAR,
    TWIN,
    WEIGHTS_ONLY,
    predictor_source,
)
from cpsr.benchmarks.recovery.sources import files_digest, package_files
from cpsr.benchmarks.recovery.trainer import State
from cpsr.benchmarks.recovery.trajectory import VALIDATION_ITERATIONS, Trajectory
from cpsr.errors import CPSRError
from cpsr.fitter.curve import LossCurve
from cpsr.fitter.end_cost import IterationWorth, end_cost_iterations
from cpsr.fitter.lag import paired_lag, transient

__all__ = ["MEASURED_ITERATIONS", "Outcome", "PointMeasurement"]

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
        reason: one sentence of the predictor, or why training diverged.
        final_gap_nats: final loss over that of the run that never failed; None where training diverged.
        repeated_iterations: trained again because of the failure.
        end_cost_iterations: both together, in iterations; None where training diverged.
        lag_iterations: over the iterations 60 to 160 after the failure; None where it cannot be determined.
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
    final_gap_nats: float | None
    repeated_iterations: int
    end_cost_iterations: float | None = None
    lag_iterations: float | None = None
    recover_seconds: float | None = None
    learning_seconds: float | None = None
    accuracy: list[dict[str, Any]] | None = None
    settings: dict[str, Any] | None = None
    curve: dict[str, Any] | None = None


class PointMeasurement:
    """Measures methods at one failure point of a trajectory that is whole already.

    What a method predicts is remembered under its name and its predictor's source. What a recovery cost is remembered
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
        outcome = Outcome(
            method,
            self._trajectory.seed,
            point,
            predicted=False,
            reason="exact, by definition",
            final_gap_nats=0.0,
            repeated_iterations=point.horizon,
            lag_iterations=float(point.horizon),
        )
        if method == RECOMPUTE:
            return self._costed(outcome)
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
            return self._costed(outcome)
        curve = self._curve(method, formed["state"])
        repeated = _repeated(method, point)
        return self._costed(
            replace(
                outcome,
                predicted=True,
                reason=curve["obstacle"] if curve["final_gap_nats"] is None else outcome.reason,
                final_gap_nats=curve["final_gap_nats"],
                repeated_iterations=repeated,
                lag_iterations=None if curve["lag"] is None else curve["lag"]["iterations"] + repeated,
                curve=curve,
            )
        )

    def _costed(self, outcome: Outcome) -> Outcome:
        gap = outcome.final_gap_nats
        if gap is None:
            return outcome
        return replace(outcome, end_cost_iterations=end_cost_iterations(gap, self._worth, outcome.repeated_iterations))

    def _formed_path(self, method: str) -> Path:
        maker = _made_by(method)
        source = predictor_source(maker) if maker in PREDICTORS else f"harness{HARNESS_VERSION}"
        return self._directory / f"formed-{method}-{source}.json"

    def _form(self, method: str) -> dict[str, Any]:
        formed = self._formed_by(method)
        key = None if formed.state is None else _curve_key(formed.state)
        self._formed = key, formed.state
        record = {field.name: getattr(formed, field.name) for field in fields(formed)} | {"state": key}
        write_json(self._formed_path(method), record)
        return record

    def _formed_by(self, method: str) -> Formed:
        """The state that a method goes on from: its own where something was lost, and exact elsewhere."""
        trajectory, point = self._trajectory, self._point
        if method == WEIGHTS_ONLY:
            return form_weights_only(trajectory, point)  # all ranks go back, those that have lost nothing too
        failure = self._failure[0]
        part = lost_part(point.lost, failure, point.checkpoint // point.interval)
        controls = {
            ORACLE: lambda: form_truth(trajectory, failure),
            MOVED: lambda: form_moved(trajectory, point, self._checkpoint, failure),
            TWIN: lambda: form_twin(trajectory, point, self._checkpoint),
            DOUBLED: lambda: form_doubled(failure),
            PLACEBO: lambda: form_placebo(trajectory, point, self._checkpoint),
            SCAR: lambda: form_scar(trajectory, point),
            CHECKFREE: lambda: form_checkfree(failure, part.spans),
        }
        if method not in controls:
            return form(method, trajectory, point, self._checkpoint, part)
        formed = controls[method]()
        return formed if formed.state is None else replace(formed, state=part.complete(formed.state))

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
            curve["final_gap_nats"] = self._final_gap(curve)
            write_json(path, curve)
        if method == ORACLE:
            _check_oracle(curve, self._directory)
        found: dict[str, Any] = curve
        return found

    def _final_gap(self, curve: dict[str, Any]) -> float | None:
        if curve["final_losses"] is None:
            return None
        return float(numpy.mean(numpy.array(curve["final_losses"]) - self._trajectory.final_losses()))

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
        trainer.train_to(self._point.failure)
        iterations, losses, seconds = [trainer.iteration], [trainer.validate().tolist()], []
        end = self._trajectory.workload.iterations
        while trainer.iteration < end:
            started = time.perf_counter()
            trainer.step()
            seconds.append(time.perf_counter() - started)
            inside = trainer.iteration <= self._point.failure + MEASURED_ITERATIONS
            if inside and trainer.iteration % VALIDATION_ITERATIONS == 0:
                iterations.append(trainer.iteration)
                losses.append(trainer.validate().tolist())
        final = trainer.final_losses().tolist()
        finite = all(math.isfinite(loss) for row in (*losses, final) for loss in row)
        return {
            "iterations": iterations,
            "losses": losses if finite else None,
            "final_losses": final if finite else None,
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
        kept = self._trajectory.curve(failure - 2 * max_lag(self._point), self._trajectory.workload.iterations)
        place = int(numpy.searchsorted(kept.iterations, failure))
        if kept.iterations[place] == failure:
            return kept
        iterations = numpy.insert(kept.iterations, place, failure)
        return LossCurve(iterations, numpy.insert(kept.losses, place, curve["fault_free_at_failure"], axis=0))


def _made_by(method: str) -> str:
    return MOVES_AS if method in (MOVED, PLACEBO) else method


def _repeated(method: str, point: Point) -> int:
    """Iterations that are trained again because of the failure."""
    if method == WEIGHTS_ONLY:
        return point.failure - point.before
    return point.horizon if method == MOVED else 0


def max_lag(point: Point) -> int:
    """The largest lag looked for, in iterations."""
    return max(MAX_LAG_ITERATIONS, 2 * point.horizon)


def _curve_key(state: State) -> str:
    """Of all that decides what follows after a state, in one trajectory, to its end."""
    return xxhash.xxh3_128(f"{state.digest()} {MEASURED_ITERATIONS} {VALIDATION_ITERATIONS} end".encode()).hexdigest()


def _figures(curve: dict[str, Any], fault_free: LossCurve, point: Point) -> dict[str, Any]:
    """Lag and transient of a recovered curve, as plain data.

    Returns:
        `lag` and `transient` (fields of the fitter's), None where they cannot be determined, and `obstacle` why not.
        `after`: iterations since the failure. `gaps_nats`: the paired gap there.
    """
    nothing: dict[str, Any] = {"lag": None, "transient": None, "after": [], "gaps_nats": []}
    if curve["losses"] is None:
        return nothing | {"obstacle": "training diverged after the recovery: a loss is not finite"}
    recovered = LossCurve(numpy.array(curve["iterations"]), numpy.array(curve["losses"]))
    gaps = recovered.losses.mean(axis=1) - fault_free.at(recovered.iterations).mean(axis=1)
    figures = nothing | {
        "obstacle": None,
        "transient": asdict(transient(recovered, fault_free, point.failure)),
        "after": (recovered.iterations - point.failure).tolist(),
        "gaps_nats": gaps.tolist(),
    }
    try:
        found = paired_lag(recovered, fault_free, point.failure, max_lag_iterations=max_lag(point))
    except ValueError as error:
        return figures | {"obstacle": f"no lag can be determined: {error}"}
    return figures | {"lag": asdict(found) | {"window": list(found.window)}}


def _check_oracle(curve: dict[str, Any], directory: Path) -> None:
    if any(gap != 0.0 for gap in (*curve["gaps_nats"], curve["final_gap_nats"])):
        raise CPSRError(
            f"the true state at the failure did not give the fault-free losses again ({directory}): nothing measured "
            "here is paired; try one thread (OMP_NUM_THREADS=1), in a new --cache"
        )
