import itertools
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.plan import failing_job as jobs
from cpsr.benchmarks.plan import real
from cpsr.benchmarks.plan.failing_job import FailingJob, Failure, JobRecord, Kill, LifeStart, follow
from cpsr.benchmarks.plan.forecast import (
    begun_between,
    each_failure,
    extra_seconds,
    forecast,
    measured,
    plan_spans,
    realised,
)
from cpsr.benchmarks.plan.injection import Injection, failing_job, failures_of, fault_free_job
from cpsr.benchmarks.plan.judgement import JobResult, judge
from cpsr.errors import ConfigError, CPSRError
from cpsr.fitter.lag import Lag
from cpsr.journal import CheckpointRow, Journal, PlanRow, RecoveryRow, StepRow

# Killed after 100 iterations, back to 90; killed after 40 more, which is 130, and goes on there.
RECORD = JobRecord(
    (Kill(0, 100, 100, 3.0), Kill(1, 140, 130, 5.0)),
    (LifeStart(0, 0), LifeStart(100, 90), LifeStart(140, 130)),
    460,
    450,
)
LAG = Lag(4.0, 1.0, 4.0, 0.01, 0.0025, 0.0025, 21, (60, 160))
SHORT = Injection(failures=2, mtbf_iterations=60, first=20, tail=310, beyond=50, apart=5)


def plan(life: int, iteration: int, interval: int, measured: bool = True, **other: Any) -> PlanRow:
    inputs = {
        "iteration_seconds": 0.5 if measured else 0.0,
        "failures_per_second": 0.02,
        "predict_seconds": 1.0,
        "persist_iterations": 2.0,
    }
    expected = {
        "stall_per_second": 0.01 if measured else "nan",
        "recovery_per_second": 0.1 if measured else 0.0,
        "horizon_iterations": 2.0 + interval / 2,
    }
    return PlanRow(
        life=life,
        from_iteration=iteration,
        interval_iterations=interval,
        origin="cpsr",
        mode=other.get("mode", "recompute"),
        explanation={"inputs": inputs, "expected": {**expected, **other.get("expected", {})}},
    )


PLANS = [
    plan(0, 0, 10, measured=False),
    plan(0, 20, 10),
    plan(1, 90, 10, measured=False),
    plan(1, 110, 20, mode="predict", expected={"recovery_per_second": -0.05}),
    plan(2, 130, 20, measured=False),
]


def test_a_plan_holds_over_the_restart_that_measures_nothing() -> None:
    spans = plan_spans(PLANS, RECORD.lives, RECORD.work)
    assert [(one.first, one.last, one.interval_iterations, one.mode) for one in spans] == [
        (20, 100, 10, "recompute"),
        (100, 120, 10, "recompute"),
        (120, 140, 20, "predict"),
        (140, 460, 20, "predict"),
    ]
    assert spans[1].expected == PLANS[1].explanation["expected"]
    assert spans[3].expected == PLANS[3].explanation["expected"]


def test_lives_that_nobody_caused_are_refused() -> None:
    with pytest.raises(CPSRError, match="failed by itself"):
        plan_spans([*PLANS, plan(3, 200, 20)], RECORD.lives, RECORD.work)


def test_the_forecast_is_summed_over_what_the_plans_applied_to() -> None:
    found = forecast(plan_spans(PLANS, RECORD.lives, RECORD.work), 20, 140, 0.25)
    assert found.stall_seconds == pytest.approx(0.01 * 120 * 0.25)
    # Predicting is part of the restart: 0.02 failures a second times 1 s, twenty iterations long.
    assert found.lag_seconds == pytest.approx(0.1 * 100 * 0.25 + (-0.05 - 0.02) * 20 * 0.25)
    assert found.lag_iterations == pytest.approx(found.lag_seconds / 0.5)
    assert found.failures == pytest.approx(0.02 * 120 * 0.25)
    assert found.horizon_iterations == pytest.approx((100 * (2 + 5) + 20 * (2 + 10)) / 120)
    assert found.total_seconds == pytest.approx(found.stall_seconds + found.lag_seconds)


def test_work_without_a_plan_is_not_judged() -> None:
    with pytest.raises(CPSRError, match="only 120 of the 140"):
        forecast(plan_spans(PLANS, RECORD.lives, RECORD.work), 0, 140, 0.25)


def test_what_is_repeated_and_what_stays_behind_are_both_lag() -> None:
    found = measured(1.5, RECORD, LAG, 0.25)
    assert (found.lag_iterations, found.lag_seconds, found.total_seconds) == (14.0, 3.5, 5.0)
    assert (found.repeated_iterations, found.behind, found.bound_iterations) == (10, LAG, None)
    beyond = measured(1.5, RECORD, -150.0, 0.25)
    assert (beyond.lag_iterations, beyond.behind, beyond.bound_iterations) == (-140.0, None, -150.0)


def test_stalls_are_what_steps_take_longer_until_a_checkpoint_is_durable() -> None:
    slow = {21: 0.5, 22: 0.25, 41: 0.75}
    steps = [StepRow(life=0, iteration=i, loss=None, learning_rate=None, seconds=slow.get(i, 0.1)) for i in range(60)]
    again = [StepRow(life=1, iteration=i, loss=None, learning_rate=None, seconds=9.0) for i in range(40, 50)]
    rows = [replace(saved(0, at), write_seconds=0.3, commit_seconds=0.3) for at in (20, 40)]
    # Durable after two steps of 0.5 and 0.25 s, and after one of 0.75 s, at a pace of 0.1 s.
    assert extra_seconds(steps + again, rows) == pytest.approx(0.4 + 0.15 + 0.65)
    assert extra_seconds(steps + again, rows[:1]) == pytest.approx(0.55)
    assert extra_seconds(again, rows) == 0.0


def test_checkpoints_are_placed_by_work() -> None:
    rows = [saved(0, 90), saved(0, 100), saved(1, 100), saved(1, 130), saved(2, 140)]
    found = begun_between(rows, RECORD.lives, 100, 140)
    assert [(row.life, row.iteration) for row in found] == [(1, 100), (1, 130)]


def saved(life: int, iteration: int) -> CheckpointRow:
    return CheckpointRow(life=life, iteration=iteration, status="committed", stall_seconds=0.125)


def recovery(life: int, failure: int, checkpoint: int, restored: int, method: str) -> RecoveryRow:
    return RecoveryRow(
        id=f"r{life}",
        life=life,
        failure_iteration=failure,
        checkpoint_iteration=checkpoint,
        restored_iteration=restored,
        method=method,
        requested_mode="auto",
        predict_seconds=0.25,
        inject_seconds=0.5,
    )


def test_failures_beside_their_plans() -> None:
    spans = plan_spans(PLANS, RECORD.lives, RECORD.work)
    recomputed = recovery(1, 100, 90, 90, "exact")
    first, second = each_failure([recomputed, recovery(2, 130, 110, 130, "vitp")], spans, RECORD, 60)
    assert (first.since_restart, first.horizon, first.planned_horizon, first.repeated) == (100, 10, 7.0, 10)
    assert (second.since_restart, second.horizon, second.planned_horizon, second.repeated) == (40, 20, 12.0, 0)
    assert not first.uncommitted
    assert not second.uncommitted
    predicted = recovery(1, 90, 80, 90, "vitp")
    assert [one.uncommitted for one in each_failure([predicted, recomputed], spans, RECORD, 60)] == [False]
    _, second = each_failure([predicted, recovery(2, 130, 80, 80, "exact")], spans, RECORD, 60)
    assert second.uncommitted


def test_a_recovery_beside_the_lag_that_it_left() -> None:
    spans = plan_spans(PLANS, RECORD.lives, RECORD.work)
    recoveries = [recovery(1, 100, 90, 90, "exact"), recovery(2, 130, 110, 130, "vitp")]
    failures = [replace(one, expected_end_cost=-30.0) for one in each_failure(recoveries, spans, RECORD, 60)]
    course = [(50, 10.0, 1.0), (100, 10.0, 1.0), (200, -10.0, 1.0), (300, -30.0, 1.0)]
    (found,) = realised(failures, course, 450)  # what is recomputed leaves no lag
    assert (found.iteration, found.quiet, found.expected) == (130, 320, -30.0)
    assert found.moved == pytest.approx(-18.0 - 10.0)  # at 240, and at 80
    (sooner,) = realised(failures, course, 150)
    assert sooner.quiet == 20
    assert sooner.moved == pytest.approx(0.0 - 10.0)
    assert realised(failures, [], 450) == []


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 20))
def test_failures_lie_in_their_stretch_and_apart(seed: int, count: int, apart: int) -> None:
    injection = replace(Injection(), failures=count, apart=apart)
    found = failures_of(injection, seed)
    assert found == failures_of(injection, seed)
    works = [failure.work for failure in found]
    assert len(works) == count
    assert injection.first <= works[0]
    assert works[-1] <= injection.last
    assert all(later - earlier >= apart for earlier, later in itertools.pairwise(works))
    assert {failure.rank for failure in found} <= {0, 1}


def test_failures_that_are_too_close_are_refused() -> None:
    with pytest.raises(ConfigError, match="no room for failures that are 90 apart"):
        failures_of(Injection(mtbf_iterations=80, apart=90), 0)


@pytest.mark.parametrize(("failures", "mtbf_iterations"), [(1, 20), (2, 40), (10, 88), (10, 300)])
def test_no_job_is_through_before_it_is_asked_to_leave(failures: int, mtbf_iterations: int) -> None:
    injection = Injection(failures=failures, mtbf_iterations=mtbf_iterations)
    for job in (fault_free_job(injection, 0), failing_job(injection, 0, "auto", 0.5)):
        assert job.stop_iteration < 0.91 * job.schedule_iterations
    assert Injection().schedule_iterations == 2000


def test_the_job_is_configured_with_its_true_rate() -> None:
    job = failing_job(Injection(), 0, "auto", 0.5)
    assert job.settings["planner"]["mtbf_hours"] == pytest.approx(88 * 0.5 / 3600)
    assert job.failures == failing_job(Injection(), 0, "exact", 0.7).failures


def write_run(run_dir: Path, behind: int, journal: bool = True) -> None:
    """A run whose loss falls as a straight line, that many iterations late; two chunks that differ by noise."""
    run_dir.mkdir(parents=True)
    with (run_dir / "validation.jsonl").open("w", encoding="utf-8") as file:
        for iteration in range(100, 501, 5):
            loss = 3.0 - 0.002 * (iteration - behind)
            file.write(json.dumps({"iteration": iteration, "losses": [loss + 0.1, loss - 0.1]}) + "\n")
    written = Journal.open(run_dir / "journal.db")
    written.start_life("auto")
    lives = [(0, range(1, 101)), (1, range(91, 131)), (2, range(131, 451))]
    for life, iterations in lives:
        written.record(
            *[StepRow(life=life, iteration=i, loss=1.0, learning_rate=1e-3, seconds=0.25) for i in iterations]
        )
    if journal:
        for one in PLANS:
            written.record(one)
        for row in (saved(0, 10), saved(0, 100), saved(1, 120), saved(2, 440)):
            written.record(row)
        written.record(recovery(1, 100, 90, 90, "exact"))
        written.record(recovery(2, 130, 110, 130, "vitp"))
    written.close(20.0)


def judged(directory: Path) -> JobResult:
    write_run(directory / "auto", behind=7)
    write_run(directory / "fault-free", behind=0, journal=False)
    return judge(SHORT, 0, "auto", RECORD, directory / "auto", directory / "fault-free")


def test_a_job_is_judged_by_its_journal_and_its_losses(tmp_path: Path) -> None:
    found = judged(tmp_path)
    assert found.measured.stall_seconds == 0.25
    assert found.measured.lag_iterations == pytest.approx(17.0, abs=0.01)
    assert found.measured.lag_seconds == pytest.approx(17.0 * 0.25, abs=0.01)
    assert found.forecast.stall_seconds == pytest.approx(0.01 * 120 * 0.25)
    assert (found.intervals, found.modes) == ({10: 100, 20: 20}, {"recompute": 100, "predict": 20})
    assert found.committed == 2
    assert found.predict_seconds == [0.75, 0.75]
    share = 2 / found.forecast.failures
    true = found.forecast.stall_seconds + share * found.forecast.lag_seconds
    assert found.error == pytest.approx(found.measured.total_seconds / found.forecast.total_seconds - 1)
    assert found.error_at_true_rate == pytest.approx(found.measured.total_seconds / true - 1)


# Stands for the job under its agent: two ranks that count, and start again ten iterations back when one is killed.
RANKS_THAT_COUNT = """
    import os, pathlib, sys, time
    from cpsr.checkpoint.progress import ProgressCounter, progress_path, read_progress

    run_dir, iteration, agent = pathlib.Path(sys.argv[1]), 0, os.getpid()
    while True:
        pids = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                counter = ProgressCounter(progress_path(run_dir, rank))
                counter.reset(iteration, 0)
                (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
                time.sleep(0.1)
                while os.getppid() == agent:  # its end is that of the ranks
                    iteration += 1
                    counter.publish(iteration, 0)
                    time.sleep(0.01)
                os._exit(0)
            pids.append(pid)
        died, _ = os.wait()
        other = next(pid for pid in pids if pid != died)
        os.kill(other, 9)
        os.waitpid(other, 0)
        iteration = max(0, read_progress(run_dir, 2).iteration - 10)
"""


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the job; the run directories that it was started in."""
    started: list[Path] = []

    def command(job: FailingJob, run_dir: Path) -> Sequence[str]:
        started.append(run_dir)
        return [sys.executable, "-c", textwrap.dedent(RANKS_THAT_COUNT), str(run_dir)]

    monkeypatch.setattr(jobs, "_command", command)
    return started


JOB = FailingJob(0, "exact", 60, 100, 40, (Failure(1, 20), Failure(0, 40)), {})


def test_a_job_is_killed_by_work_and_followed_to_its_end(tmp_path: Path, counting: list[Path]) -> None:
    seen: list[int] = []
    record = follow(JOB, tmp_path / "run", seen.append)
    assert [kill.rank for kill in record.kills] == [1, 0]
    assert all(0 <= kill.work - failure.work <= 3 for kill, failure in zip(record.kills, JOB.failures, strict=True))
    assert all(kill.restart_seconds > 0.05 for kill in record.kills)
    assert len(record.lives) == 3
    assert record.iteration >= 60
    assert record.repeated == record.work - record.iteration == pytest.approx(20, abs=2)
    assert record.lives[1].work - record.lives[1].iteration == pytest.approx(10, abs=1)
    assert max(seen) >= 60

    assert follow(JOB, tmp_path / "run", seen.append) == record
    assert len(counting) == 1  # nothing was run again
    other = replace(JOB, stop_iteration=15, failures=())
    assert follow(other, tmp_path / "run", seen.append).kills == ()
    assert len(counting) == 2


def test_a_job_that_ends_by_itself_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_command", lambda job, run_dir: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(CPSRError, match=r"status 3; see .*job\.log"):
        follow(JOB, tmp_path / "run", lambda iteration: None)


def test_figures_and_plot_of_kept_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = tmp_path / "mtbf-60" / "seed-0"
    judged(seed)
    write_run(seed / "exact", behind=0)
    keep(fault_free_job(SHORT, 0), seed / "fault-free", JobRecord((), (LifeStart(0, 0),), 500, 500))
    for mode in ("exact", "auto"):
        keep(failing_job(SHORT, 0, mode, 0.25), seed / mode, RECORD)
    real.main(tmp_path / "real.json", 1, tmp_path, SHORT)
    report = json.loads((tmp_path / "real.json").read_text(encoding="utf-8"))
    assert [job["mode"] for job in report["jobs"]] == ["exact", "auto"]
    assert report["all_seeds"]["auto"]["measured"]["lag_iterations"] == pytest.approx(17.0, abs=0.01)
    assert report["all_seeds"]["exact"]["error"] == report["jobs"][0]["error"]
    assert (tmp_path / "real.png").stat().st_size > 0
    assert "forecast by the plans" in capsys.readouterr().out


def keep(job: FailingJob, run_dir: Path, record: JobRecord) -> None:
    (run_dir / jobs.RECORD).write_text(json.dumps({"job": asdict(job), **asdict(record)}), encoding="utf-8")
