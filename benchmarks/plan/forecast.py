"""What a job's plans predicted its checkpoints and failures to cost, and what they did cost."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy

from cpsr.benchmarks.plan.failing_job import JobRecord, LifeStart
from cpsr.demo.report import validation_curve
from cpsr.errors import CPSRError
from cpsr.fitter.curve import LossCurve
from cpsr.fitter.lag import Lag, LagBeyondError, paired_lag
from cpsr.journal import CheckpointRow, JournalReader, PlanRow, RecoveryRow, StepRow
from cpsr.planner.live.stall import StallMeter

__all__ = [
    "Cost",
    "FailureCost",
    "Forecast",
    "Measured",
    "PlanSpan",
    "Realised",
    "begun_between",
    "each_failure",
    "extra_seconds",
    "forecast",
    "lag_behind",
    "lag_course",
    "measured",
    "median_iteration_seconds",
    "plan_spans",
    "realised",
]

# A failure's own share of the lag: from the window before it to the one in which a lag is measured.
BEFORE_ITERATIONS, AFTER_ITERATIONS = 50, 110
COURSE_WINDOW_ITERATIONS = 100  # the course of the lag is taken over as many, of which half overlap with the next
COURSE_STEP_ITERATIONS = 50
LAG_MAX_ITERATIONS = 400  # ten failures; as far as the run that does not fail goes on
LAG_WINDOW = (60, 160)  # iterations: the transient of a recovery is over, and the loss still shows the time


@dataclass(frozen=True)
class PlanSpan:
    """A plan, and the work over which it applied.

    Attributes:
        expected: of its explanation; where it carried an earlier life's interval over, of the plan that measured.
        inputs: of its explanation, likewise.
        mode: how a failure would be recovered from.
        interval_iterations: of the plan.
        first, last: the iterations trained, repeated ones counted again: `first < work <= last`.
    """

    expected: Mapping[str, float]
    inputs: Mapping[str, Any]
    mode: str
    interval_iterations: int
    first: int
    last: int

    @property
    def lag_per_second(self) -> float:
        """Expected seconds lost to failures for each second, without the time to predict, which restarting includes."""
        predicting = self.inputs["predict_seconds"] if self.mode == "predict" else 0.0
        return float(self.expected["recovery_per_second"] - self.inputs["failures_per_second"] * predicting)


@dataclass(frozen=True)
class Cost:
    """Stalls and lag of one job.

    Attributes:
        stall_seconds: what the training thread lost to checkpoints.
        lag_seconds: iterations that failures cost, times an iteration; negative where they came out ahead.
        lag_iterations: the same in iterations.
    """

    stall_seconds: float
    lag_seconds: float
    lag_iterations: float

    @property
    def total_seconds(self) -> float:
        """Both together."""
        return self.stall_seconds + self.lag_seconds


@dataclass(frozen=True)
class Forecast(Cost):
    """What the plans predicted.

    Attributes:
        failures: that they expected in that time.
        horizon_iterations: mean distance that they expected between a failure and its checkpoint.
    """

    failures: float
    horizon_iterations: float


@dataclass(frozen=True)
class Measured(Cost):
    """What happened.

    Attributes:
        repeated_iterations: trained more than once.
        behind: lag of the losses, on the axis of iterations; None where it is beyond what can be measured.
        bound_iterations: then the lag that is at least there, and is counted; else None.
    """

    repeated_iterations: int
    behind: Lag | None
    bound_iterations: float | None


@dataclass(frozen=True)
class FailureCost:
    """One failure beside its plan.

    Attributes:
        iteration: f.
        since_restart: iterations trained in the life that it ended.
        uncommitted: whether that life was still watching a predicted state, and so had committed nothing.
        horizon: from the checkpoint to the failure, in iterations.
        planned_horizon: what the plan expects on average.
        interval: of the plan.
        method: of the recovery.
        outcome: of the recovery.
        repeated: iterations that were to be trained again.
        expected_end_cost: what the recovery itself expected, in iterations.
        reason: of the recovery.
    """

    iteration: int
    since_restart: int
    uncommitted: bool
    horizon: int
    planned_horizon: float
    interval: int
    method: str
    outcome: str
    repeated: int
    expected_end_cost: float | None
    reason: str


@dataclass(frozen=True)
class Realised:
    """What one predicted recovery was expected to cost, and by how much the lag moved, in iterations.

    Attributes:
        iteration: of the failure.
        quiet: until the next failure, or the end.
        expected: by the recovery.
        moved: from before the failure to the middle of the window in which a lag is measured, or to the next failure.
    """

    iteration: int
    quiet: int
    expected: float
    moved: float


def plan_spans(plans: Sequence[PlanRow], lives: Sequence[LifeStart], work: int) -> list[PlanSpan]:
    """Which plan applied when.

    A life begins with the interval that applied before, and with nothing measured: what was expected of it still is.

    Args:
        plans: of the journal, in the order in which they came to hold.
        lives: where each life began.
        work: of the whole job.

    Raises:
        CPSRError: the journal has other lives than were watched.
    """
    if any(plan.life >= len(lives) for plan in plans):
        raise CPSRError("the journal has more lives than failures: the job failed by itself, see its log")
    starts = [_work_at(plan.life, plan.from_iteration, lives) for plan in plans]
    known: PlanRow | None = None
    spans = []
    for plan, first, last in zip(plans, starts, [*starts[1:], work], strict=True):
        if _is_measured(plan):
            known = plan
        if known is not None and first < last:
            explanation = known.explanation
            mode = str(known.mode)
            spans.append(
                PlanSpan(explanation["expected"], explanation["inputs"], mode, plan.interval_iterations, first, last)
            )
    return spans


def forecast(plans: Sequence[PlanSpan], first: int, last: int, iteration_seconds: float) -> Forecast:
    """What plans expected of the work from `first` to `last`.

    Args:
        plans: of the job, with their work.
        first: work before what is counted.
        last: work at its end.
        iteration_seconds: how long an iteration took.

    Raises:
        CPSRError: a part of the work was done before anything was planned.
    """
    parts = [(plan, max(0, min(plan.last, last) - max(plan.first, first))) for plan in plans]
    planned = sum(work for _, work in parts)
    if planned < last - first:
        raise CPSRError(f"only {planned} of the {last - first} iterations that are judged were planned for")
    spans = [(plan, work * iteration_seconds) for plan, work in parts]
    return Forecast(
        stall_seconds=sum(plan.expected["stall_per_second"] * seconds for plan, seconds in spans),
        lag_seconds=sum(plan.lag_per_second * seconds for plan, seconds in spans),
        lag_iterations=sum(plan.lag_per_second * seconds / plan.inputs["iteration_seconds"] for plan, seconds in spans),
        failures=sum(plan.inputs["failures_per_second"] * seconds for plan, seconds in spans),
        horizon_iterations=sum(_planned_horizon(plan) * work for plan, work in parts) / planned,
    )


def extra_seconds(steps: Sequence[StepRow], checkpoints: Sequence[CheckpointRow]) -> float:
    """Extra time of the training thread for some checkpoints, as a running job's planner measures it.

    Args:
        steps: of the whole job, as they were recorded: the pace without a checkpoint is that of those before.
        checkpoints: whose time it is.
    """
    begun = {(row.life, row.iteration): row for row in checkpoints if row.status == "committed"}
    return sum(_extra_seconds(list(mine), begun) for _, mine in groupby(steps, key=lambda step: step.life))


def _extra_seconds(steps: Sequence[StepRow], begun: Mapping[tuple[int, int], CheckpointRow]) -> float:
    """Of one life; one that ends meanwhile has a checkpoint's time up to there."""
    meter = StallMeter()
    writing: CheckpointRow | None = None
    total = left = 0.0
    for step in steps:
        meter.step(step.seconds)
        left -= step.seconds
        row = begun.get((step.life, step.iteration))
        if writing is not None and (left <= 0 or row is not None or step is steps[-1]):
            total += meter.durable(writing.stall_seconds or 0.0)
            writing = None
        if row is not None:
            meter.begun()
            writing, left = row, (row.write_seconds or 0.0) + (row.commit_seconds or 0.0)
    return total + (0.0 if writing is None else meter.durable(writing.stall_seconds or 0.0))


def measured(stalls: float, record: JobRecord, behind: Lag | float, iteration_seconds: float) -> Measured:
    """What the failures of a job cost.

    Args:
        stalls: seconds that the training thread lost to checkpoints while it could fail; see `extra_seconds`.
        record: of the job.
        behind: its losses' lag; or the bound that it is beyond.
        iteration_seconds: how long an iteration took.
    """
    bound = behind if isinstance(behind, float) else None
    lag = record.repeated + (behind if isinstance(behind, float) else behind.iterations)
    measured_lag = None if isinstance(behind, float) else behind
    return Measured(stalls, lag * iteration_seconds, lag, record.repeated, measured_lag, bound)


def lag_behind(run_dir: Path, fault_free: Path, iterations: int) -> Lag | float:
    """Lag at the end of a run, on the axis of iterations; or the bound that it is beyond.

    Args:
        run_dir: of the run that failed.
        fault_free: of the run that did not.
        iterations: the end of the window; the last failure lies at least 160 before.
    """
    try:
        curves = validation_curve(run_dir), validation_curve(fault_free)
        return paired_lag(*curves, iterations - LAG_WINDOW[1], LAG_WINDOW, LAG_MAX_ITERATIONS)
    except LagBeyondError as error:
        return error.bound_iterations


def lag_course(run_dir: Path, fault_free: Path, first: int) -> list[tuple[int, float, float]]:
    """How far the run was behind the other all along, recoveries' transients included.

    Args:
        run_dir: of the run that failed.
        fault_free: of the run that did not.
        first: iteration from which it is measured.

    Returns:
        Iteration, lag and its standard error, in iterations; where the losses do not show it there is none.
    """
    run, other = validation_curve(run_dir), validation_curve(fault_free)
    common = numpy.isin(run.iterations, other.iterations)
    shared = LossCurve(run.iterations[common], run.losses[common])
    course = []
    for start in range(first, int(shared.iterations[-1]) - COURSE_WINDOW_ITERATIONS + 1, COURSE_STEP_ITERATIONS):
        window = start, (0, COURSE_WINDOW_ITERATIONS), LAG_MAX_ITERATIONS
        try:
            lag = paired_lag(shared, other, *window)
            # What the smoothed curve misses of the other run's own is missed of both.
            missed = paired_lag(other, other, *window).iterations
        except ValueError:
            continue
        course.append((start + COURSE_WINDOW_ITERATIONS // 2, lag.iterations - missed, lag.standard_error))
    return course


def begun_between(
    checkpoints: Sequence[CheckpointRow], lives: Sequence[LifeStart], first: int, last: int
) -> list[CheckpointRow]:
    """The checkpoints that were begun between two amounts of work."""
    return [row for row in checkpoints if first < _work_at(row.life, row.iteration, lives) <= last]


def each_failure(
    recoveries: Sequence[RecoveryRow], plans: Sequence[PlanSpan], record: JobRecord, watch_iterations: int
) -> Iterator[FailureCost]:
    """Every failure, where the journal has its recovery.

    Args:
        recoveries: of the journal; one a life but the first.
        plans: of the job, with their work.
        record: of the job.
        watch_iterations: after a predicted restart, in which nothing is committed.
    """
    by_life = {row.life: row for row in recoveries}
    for number, kill in enumerate(record.kills):
        row, before = by_life.get(number + 1), by_life.get(number)
        plan = next((one for one in plans if one.first < kill.work <= one.last), None)
        if row is None or plan is None or row.failure_iteration is None or row.checkpoint_iteration is None:
            continue
        since = kill.work - record.lives[number].work
        watching = before is not None and before.restored_iteration == before.failure_iteration
        yield FailureCost(
            iteration=row.failure_iteration,
            since_restart=since,
            uncommitted=watching and since < watch_iterations,
            horizon=row.failure_iteration - row.checkpoint_iteration,
            planned_horizon=_planned_horizon(plan),
            interval=plan.interval_iterations,
            method=row.method,
            outcome=row.outcome,
            repeated=row.failure_iteration - row.restored_iteration,
            expected_end_cost=row.expected_end_cost_iterations,
            reason=row.reason,
        )


def realised(failures: Sequence[FailureCost], course: Sequence[tuple[int, float, float]], end: int) -> list[Realised]:
    """What became of each predicted recovery; the course's windows overlap, so that neighbours share some of it.

    Args:
        failures: of the job, in their order.
        course: see `lag_course`.
        end: iteration at which the job does.
    """
    if not course:
        return []
    at, lags = [point for point, _, _ in course], [lag for _, lag, _ in course]
    found = []
    for failure, following in zip(failures, [*(one.iteration for one in failures[1:]), end], strict=True):
        if failure.expected_end_cost is None or failure.repeated:
            continue
        before = numpy.interp(failure.iteration - BEFORE_ITERATIONS, at, lags)
        after = numpy.interp(min(failure.iteration + AFTER_ITERATIONS, following), at, lags)
        quiet = following - failure.iteration
        found.append(Realised(failure.iteration, quiet, failure.expected_end_cost, float(after - before)))
    return found


def median_iteration_seconds(run_dir: Path) -> float:
    """Of a run, all lives together; the few that a validation follows do not move it.

    Raises:
        JournalError: the run's journal cannot be read.
    """
    with JournalReader(run_dir / "journal.db") as reader:
        return statistics.median(step.seconds for step in reader.losses())


def _work_at(life: int, iteration: int, lives: Sequence[LifeStart]) -> int:
    return lives[life].work + max(0, iteration - lives[life].iteration)


def _is_measured(plan: PlanRow) -> bool:
    inputs = plan.explanation.get("inputs", {})
    return bool(inputs.get("iteration_seconds")) and isinstance(plan.explanation["expected"]["stall_per_second"], float)


def _planned_horizon(plan: PlanSpan) -> float:
    """Of the plan that measured; the interval may be that of an earlier one for some iterations."""
    return float(plan.expected["horizon_iterations"])
