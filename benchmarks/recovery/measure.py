"""What one way to come back from one failure cost; every result is a file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from cpsr.benchmarks.harness.files import read_json, write_json
from cpsr.benchmarks.recovery.end_cost import IterationWorth, end_cost_iterations
from cpsr.benchmarks.recovery.failure import Failure
from cpsr.benchmarks.recovery.grid import Cell, Point
from cpsr.benchmarks.recovery.methods import AUTO, CONTROLS, ORACLE, RECOMPUTE, decide, digest, form, repeats
from cpsr.benchmarks.recovery.trajectory import Trajectory
from cpsr.errors import CPSRError

__all__ = ["Outcome", "outcomes_at"]


@dataclass(frozen=True)
class Outcome:
    """What one method's recovery from one failure cost.

    Attributes:
        method: its name.
        workload: name of what was trained.
        seed: of the training run.
        point: the failure.
        formed: False where the method advises against itself, or recomputes: the cost is then the horizon.
        reason: one sentence of the predictor.
        final_gap_nats: final loss over that of the run that never failed; None where training diverged.
        end_cost_iterations: with the iterations that were trained again; None likewise.
        control_iterations: the end cost of what the method does beside coming back (it moves weights, it raises rates),
            done at the failure with nothing lost; 0 where it does nothing else, None where training diverged.
    """

    method: str
    workload: str
    seed: int
    point: Point
    formed: bool
    reason: str
    final_gap_nats: float | None
    end_cost_iterations: float | None
    control_iterations: float | None = 0.0

    @property
    def cell(self) -> Cell:
        """Of the grid."""
        return Cell(self.workload, self.point.interval, self.point.fraction, self.point.lost)

    @property
    def net_iterations(self) -> float | None:
        """What the failure cost beside what a run without one could have gained in the same way."""
        if self.end_cost_iterations is None or self.control_iterations is None:
            return None
        return self.end_cost_iterations - self.control_iterations


def outcomes_at(trajectory: Trajectory, point: Point, methods: Sequence[str], worth: IterationWorth) -> list[Outcome]:
    """Measure methods at one failure, or read what was measured before with the same predictors.

    Raises:
        CPSRError: the cache is damaged, or the machine does not compute the same twice.
    """
    failure = Failure(trajectory, point)
    return [_outcome(failure, method, worth) for method in methods]


def _outcome(failure: Failure, method: str, worth: IterationWorth) -> Outcome:
    point, trajectory = failure.point, failure.trajectory
    if method == AUTO:
        taken = decide(failure)
        found = _outcome(failure, taken, worth)
        return replace(found, method=AUTO, reason=f"{taken}: {found.reason}")
    kept: dict[str, Any] = {"formed": False, "reason": "exact, by definition"}
    if method != RECOMPUTE:
        kept = _kept(failure, method)
    gap: float | None = kept["final_gap_nats"] if kept["formed"] else 0.0
    recomputes = not kept["formed"] and method not in CONTROLS.values()  # a control that cannot move is no failure
    repeated = point.horizon if repeats(method) or recomputes else 0
    return Outcome(
        method,
        trajectory.workload.name,
        trajectory.seed,
        point,
        kept["formed"],
        kept["reason"],
        gap,
        None if gap is None else end_cost_iterations(gap, worth, repeated),
        _control(failure, method, worth) if kept["formed"] else 0.0,
    )


def _control(failure: Failure, method: str, worth: IterationWorth) -> float | None:
    if method not in CONTROLS:
        return 0.0
    gap: float | None = _kept(failure, CONTROLS[method])["final_gap_nats"]
    return None if gap is None else end_cost_iterations(gap, worth)


def _kept(failure: Failure, method: str) -> dict[str, Any]:
    """What is in the cache, measured where it is not."""
    point = failure.point
    part = "" if point.lost == "all" else f"-lost-{point.lost.replace('/', '-')}"
    folder = failure.trajectory.directory / "points" / f"T{point.interval:03d}-f{point.failure:05d}{part}"
    path = folder / f"{method}-{digest(method)}.json"
    found: dict[str, Any] | None = read_json(path)
    if found is None:
        found = _measured(failure, method)
        write_json(path, found)
    if method == ORACLE and found["final_gap_nats"] != 0.0:
        raise CPSRError(
            f"the true state at the failure did not give the fault-free losses again ({folder}): nothing measured here "
            "is paired; try one thread (OMP_NUM_THREADS=1), in a new --cache"
        )
    return found


def _measured(failure: Failure, method: str) -> dict[str, Any]:
    formed = form(method, failure)
    if formed.state is None:
        return {"formed": False, "reason": formed.reason}
    trainer = failure.trajectory.trainer()
    trainer.load(formed.state)
    trainer.scale_rates(formed.rate_factor, formed.rate_until)
    trainer.train_to(failure.trajectory.workload.iterations)
    gap = float(numpy.mean(trainer.final_losses() - failure.trajectory.final_losses()))
    return {"formed": True, "reason": formed.reason, "final_gap_nats": gap if math.isfinite(gap) else None}
