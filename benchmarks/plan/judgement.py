"""A finished job compared with its plans."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cpsr.benchmarks.plan.failing_job import JobRecord
from cpsr.benchmarks.plan.forecast import (
    COURSE_WINDOW_ITERATIONS,
    Cost,
    FailureCost,
    Forecast,
    Measured,
    Realised,
    begun_between,
    each_failure,
    extra_seconds,
    forecast,
    lag_behind,
    lag_course,
    measured,
    median_iteration_seconds,
    plan_spans,
    realised,
)
from cpsr.benchmarks.plan.injection import Injection, Mode
from cpsr.journal import JournalReader
from cpsr.predictor.watch import WATCH_ITERATIONS

__all__ = ["JobResult", "judge", "relative_error"]

Key = TypeVar("Key", int, str)


@dataclass(frozen=True)
class JobResult:
    """One job that failed, judged.

    Attributes:
        seed: of the job.
        mode: as configured.
        iteration_seconds: of the job, its median.
        forecast: of its plans, over the work in which it could fail.
        measured: over the same work.
        failures: each of them.
        restart_seconds: of each failure, from the kill to the first new step.
        predict_seconds: of each failure, to predict and inject; part of the restart.
        intervals: those that applied while it could fail, with the iterations for which they did.
        modes: likewise.
        committed: checkpoints while it could fail.
        course: iteration, lag and its standard error, all along the run.
        realised: of each predicted recovery, what was expected and how the lag moved.
    """

    seed: int
    mode: Mode
    iteration_seconds: float
    forecast: Forecast
    measured: Measured
    failures: list[FailureCost]
    restart_seconds: list[float]
    predict_seconds: list[float]
    intervals: dict[int, int]
    modes: dict[str, int]
    committed: int
    course: list[tuple[int, float, float]]
    realised: list[Realised]

    @property
    def error(self) -> float:
        """Of the forecast's total: measured less forecast, over the size of the forecast."""
        return relative_error(self.measured, self.forecast)

    @property
    def forecast_at_true_rate(self) -> Cost:
        """The forecast, had the plans expected just as many failures as there were.

        They are given the rate of the run that did not fail, and the failures are injected by work. On a
        machine that has become slower since, a plan expects more of them in the longer time.
        """
        share = len(self.restart_seconds) / self.forecast.failures
        forecast = self.forecast
        return Cost(forecast.stall_seconds, forecast.lag_seconds * share, forecast.lag_iterations * share)

    @property
    def recoveries_lag_iterations(self) -> float:
        """What the recoveries themselves expected, each knowing its horizon; recomputing costs what it repeats."""
        return sum(
            float(failure.repeated)
            if failure.expected_end_cost is None or failure.repeated
            else failure.expected_end_cost
            for failure in self.failures
        )

    @property
    def error_at_true_rate(self) -> float:
        """Of that forecast's total."""
        return relative_error(self.measured, self.forecast_at_true_rate)


def relative_error(happened: Cost, expected: Cost) -> float:
    """Measured less forecast, over the size of the forecast, which may be below zero."""
    return (happened.total_seconds - expected.total_seconds) / abs(expected.total_seconds)


def judge(injection: Injection, seed: int, mode: Mode, record: JobRecord, run_dir: Path, fault_free: Path) -> JobResult:
    """Hold what a finished job lost against its plans.

    Args:
        injection: lengths of the job.
        seed: of the job.
        mode: of the job.
        record: of what was done to it.
        run_dir: of the job.
        fault_free: of the run of the same seed that did not fail.

    Raises:
        CPSRError: its journal does not fit what was done to it.
    """
    seconds = median_iteration_seconds(run_dir)
    span = injection.first, injection.last
    with JournalReader(run_dir / "journal.db") as reader:
        plans = plan_spans(reader.plans(), record.lives, record.work)
        checkpoints, recoveries = reader.checkpoints(), reader.recoveries()
        steps = reader.recent_steps(2 * record.work)[::-1]  # all of them, in the order of time
    checkpoints = begun_between(checkpoints, record.lives, *span)
    stalls = extra_seconds(steps, checkpoints)
    failures = list(each_failure(recoveries, plans, record, WATCH_ITERATIONS))
    course = lag_course(run_dir, fault_free, injection.first - COURSE_WINDOW_ITERATIONS)
    exposed = [(plan, min(plan.last, span[1]) - max(plan.first, span[0])) for plan in plans]
    exposed = [(plan, work) for plan, work in exposed if work > 0]
    return JobResult(
        seed=seed,
        mode=mode,
        iteration_seconds=seconds,
        forecast=forecast(plans, *span, seconds),
        measured=measured(stalls, record, lag_behind(run_dir, fault_free, injection.iterations), seconds),
        failures=failures,
        restart_seconds=[kill.restart_seconds for kill in record.kills],
        predict_seconds=[(row.predict_seconds or 0.0) + (row.inject_seconds or 0.0) for row in recoveries],
        intervals=_summed((plan.interval_iterations, work) for plan, work in exposed),
        modes=_summed((plan.mode, work) for plan, work in exposed),
        committed=sum(row.status == "committed" for row in checkpoints),
        course=course,
        realised=realised(failures, course, injection.iterations),
    )


def _summed(parts: Iterable[tuple[Key, int]]) -> dict[Key, int]:
    total: dict[Key, int] = {}
    for key, work in parts:
        total[key] = total.get(key, 0) + work
    return total
