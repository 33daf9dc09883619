import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from cpsr.errors import JournalError
from cpsr.journal import (
    Journal,
    PlanOverride,
    ReportedFailure,
    latest_override,
    override_plan,
    report_failure,
    reported_failures,
)
from cpsr.journal.commands import COMMANDS_FILE


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    Journal.open(tmp_path / "journal.db").close()
    return tmp_path


def failure(description: str = "two GPUs", at: float = 5.0, reported: float = 6.0) -> ReportedFailure:
    return ReportedFailure(description=description, failed_unix_seconds=at, created_unix_seconds=reported)


def test_what_was_reported_is_read_in_its_order(run_dir: Path) -> None:
    assert reported_failures(run_dir) == []
    reports = [failure("ümlaut; 'quotes'", 9.0), failure(at=3.0)]
    for one in reports:
        report_failure(run_dir, one)
    assert reported_failures(run_dir) == reports


def test_a_report_survives_the_death_of_its_process(run_dir: Path) -> None:
    script = (
        "import os, pathlib; from cpsr.journal import *;"
        f"report_failure(pathlib.Path({str(run_dir)!r}), ReportedFailure(description='x', failed_unix_seconds=1.0));"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == -9
    assert [one.description for one in reported_failures(run_dir)] == ["x"]


def test_without_a_run_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no run in"):
        report_failure(tmp_path, failure())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_refused_and_left_alone(run_dir: Path) -> None:
    path = run_dir / COMMANDS_FILE
    path.write_text("once upon a time " * 100)
    with pytest.raises(JournalError, match=str(path)):
        report_failure(run_dir, failure())
    with pytest.raises(JournalError, match=str(path)):
        reported_failures(run_dir)
    assert path.read_text() == "once upon a time " * 100


def override(interval: int, reason: str = "x") -> PlanOverride:
    return PlanOverride(
        interval_iterations=interval, reason=reason, expires_unix_seconds=10.0, created_unix_seconds=5.0
    )


def test_the_newest_override_is_the_one(run_dir: Path) -> None:
    assert latest_override(run_dir) is None
    for place, one in enumerate((override(5), override(9, "ümlaut; 'quotes'")), start=1):
        assert override_plan(run_dir, one) == place
        assert latest_override(run_dir) == dataclasses.replace(one, id=place)
    assert (override(5).holds(9.9), override(5).holds(10.0)) == (True, False)
