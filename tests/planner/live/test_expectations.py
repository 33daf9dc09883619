from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from cpsr.config import CPSRConfig
from cpsr.fitter.failures import FailureClasses
from cpsr.journal import FailureRow, Journal, JournalReader, RecoveryRow, ReportedFailure, StepRow
from cpsr.planner.live.expectations import Curves, fit_curves

CONFIG = CPSRConfig.load({"run_dir": "run", "planner": {"mtbf_hours": 2.0}})
ACCURACY: list[dict[str, Any]] = [
    {
        "iteration": 100 * count,
        "checkpoints": count,
        "horizon_iterations": 100,
        "mean_square_error": 1e-6 * 0.9**count,
    }
    for count in range(3, 12)
]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal.open(tmp_path / "journal.db")
    journal.start_life("auto")
    yield journal
    journal.close()


def step(iteration: int, loss: float | None) -> StepRow:
    return StepRow(life=0, iteration=iteration, loss=loss, learning_rate=1e-3, seconds=0.5)


def fitted(journal: Journal, iteration: int = 400) -> Curves:
    assert journal.flush(20.0)
    with JournalReader(journal.path) as reader:
        return fit_curves(reader, ACCURACY, iteration, CONFIG)


def test_all_curves_of_a_run(journal: Journal) -> None:
    noise = numpy.random.default_rng(0).normal(0.0, 0.01, 401)
    journal.record(*[step(i, 3.0 * float(numpy.exp(-1e-3 * i)) + noise[i]) for i in range(1, 401)])
    journal.record(
        RecoveryRow(
            id="r",
            life=0,
            failure_iteration=90,
            checkpoint_iteration=50,
            restored_iteration=90,
            method="vitp",
            requested_mode="auto",
            load_seconds=2.0,
            predict_seconds=0.5,
            inject_seconds=0.25,
        )
    )
    exact = {"method": "exact", "load_seconds": 1.0, "predict_seconds": 0.0, "inject_seconds": 0.1}
    journal.record(
        RecoveryRow(
            id="s",
            life=0,
            failure_iteration=None,
            checkpoint_iteration=90,
            restored_iteration=90,
            requested_mode="auto",
            **exact,  # type: ignore[arg-type]  # of several types
        )
    )
    found = fitted(journal)
    assert found.loss is not None
    assert found.loss.alpha1_per_iteration == pytest.approx(1e-3, rel=0.1)
    assert found.accuracy is not None
    assert found.accuracy.tau1_per_checkpoint == pytest.approx(-numpy.log(0.9), rel=1e-3)
    assert (found.failures.total.failures, found.failures.total.exposure_seconds) == (0, 200.0)
    assert found.failures.total.prior_mtbf_hours == 2.0
    assert found.predict_seconds == 0.75
    assert [kind for kind, _ in found.to_rows()] == ["failure_rate", "loss", "predictor"]


def recovery(number: int, method: str, restored_iteration: int, **others: Any) -> RecoveryRow:
    """After a failure at 90, from checkpoint 50."""
    return RecoveryRow(
        id=str(number),
        life=number,
        failure_iteration=90,
        checkpoint_iteration=50,
        restored_iteration=restored_iteration,
        method=method,
        requested_mode="auto",
        **others,
    )


def test_a_restart_that_found_a_prediction_too_dear_or_moved_the_checkpoint_is_none_that_was_kept(
    journal: Journal,
) -> None:
    ended = [("line", "kept", 90), ("exact", "vetoed", 50), ("exact", "kept", 50), ("line", "kept", 50)]
    for number, (method, outcome, restored) in enumerate(ended):
        settings = {"method": "line", "context": {"interval_iterations": 50.0}}
        journal.record(recovery(number, method, restored, settings=settings, outcome=outcome))
    assert fitted(journal).outcomes == {"kept": 1, "vetoed": 1}


def test_the_mean_share_counts_one_whole_failure_in_advance_and_no_checkpoint_that_was_moved(journal: Journal) -> None:
    for number, (method, restored, share) in enumerate([("line", 90, 0.25), ("exact", 50, 0.25), ("line", 50, 1.0)]):
        journal.record(recovery(number, method, restored, settings={"method": "line", "lost_share": share}))
    assert fitted(journal).lost_share == pytest.approx((1.0 + 0.25 + 0.25) / 3)


def test_what_cannot_be_fitted_is_left_out(journal: Journal) -> None:
    journal.record(*[step(1, None), step(2, float("nan")), step(3, -1.0), step(4, 2.0)])
    assert journal.flush(20.0)
    with JournalReader(journal.path) as reader:
        found = fit_curves(reader, [{"iteration": 9, "vitp_cosine": 0.5}], 4, CONFIG)  # of another version
    assert (found.loss, found.accuracy) == (None, None)
    assert [kind for kind, _ in found.to_rows()] == ["failure_rate"]


def test_losses_of_a_branch_that_was_given_up_do_not_count(journal: Journal) -> None:
    journal.record(*[step(i, 2.0) for i in range(1, 101)])
    journal.record(*[step(i, 9.0) for i in range(101, 200)])
    found = fitted(journal, iteration=100)
    assert found.loss is not None
    assert found.loss.last_iteration == 100


def lives_of(tmp_path: Path, endings: Sequence[str]) -> Path:
    """A journal with a life for each ending; `killed` leaves none."""
    path = tmp_path / "journal.db"
    for ending in endings:
        journal = Journal.open(path)
        journal.start_life("auto")
        if ending != "killed":
            journal.end_life(ending)  # type: ignore[arg-type]  # one of three words
        journal.close()
    return path


@pytest.mark.parametrize(
    ("endings", "failures"),
    [
        (["killed"], 0),  # the life that is running
        (["killed", "killed"], 1),
        (["killed", "killed", "killed", "killed"], 3),  # also where none of them got to a checkpoint
        (["clean", "sigterm", "killed"], 0),
        (["error", "clean", "killed", "killed"], 2),
    ],
)
def test_lives_that_were_killed_or_ended_by_an_error_are_failures(
    tmp_path: Path, endings: list[str], failures: int
) -> None:
    with JournalReader(lives_of(tmp_path, endings)) as reader:
        assert fit_curves(reader, [], 1, CONFIG).failures.total.failures == failures


def test_reported_failures_count_once_and_within_the_run(tmp_path: Path) -> None:
    with JournalReader(lives_of(tmp_path, ["killed", "killed"])) as reader:
        first, second = (life.started_unix_seconds for life in reader.lives())
        reports = [
            ReportedFailure(description="before the run", failed_unix_seconds=first - 1.0),
            ReportedFailure(description="what the restart shows", failed_unix_seconds=second + 60.0),
            ReportedFailure(description="another", failed_unix_seconds=second + 3600.0),
            ReportedFailure(description="the same again", failed_unix_seconds=second + 3601.0),
        ]
        assert fit_curves(reader, [], 1, CONFIG, reports).failures.total.failures == 2


def test_failures_are_counted_by_what_they_left(tmp_path: Path) -> None:
    path = lives_of(tmp_path, ["killed", "sigterm", "error", "killed", "killed"])
    journal = Journal.open(path)
    # What life 1 left is no failure, and of life 3 nothing is known.
    for life, scope in ((0, "process"), (1, "machine"), (2, "machine"), (3, None)):
        journal.record(FailureRow(life=life, iteration=9, checkpoint_iteration=5, description="", scope=scope))  # type: ignore[arg-type]
    journal.close()
    with JournalReader(path) as reader:
        found = fit_curves(reader, [], 1, CONFIG).failures
    assert (found.total.failures, dict(found.seen)) == (3, {"process": 1, "machine": 1})
    assert dict(seen_by_scope(found)) == {"process": 1, "machine": 1, "everything": 0}


def seen_by_scope(found: FailureClasses) -> Iterator[tuple[str, int]]:
    for scope, rate in found.to_dict()["classes"].items():
        yield scope, rate["seen"]
