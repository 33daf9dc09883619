"""`cpsr inspect`."""

import json
import math
from pathlib import Path

import pytest

from cpsr.journal import CheckpointRow, EventRow, FailureRow, Journal, PlanRow, RecoveryRow
from tests.cli.commands import cpsr


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that was killed at 92, recovered at once, and is training on."""
    for life in range(2):
        journal = Journal.open(tmp_path / "journal.db")
        journal.start_life("predict", ranks=4 - life)
        if life == 0:
            journal.record(PlanRow(life=0, from_iteration=0, interval_iterations=50, origin="fixed"))
            journal.record(CheckpointRow(life=0, iteration=50, status="committed", bytes=2048, stall_seconds=0.012))
        else:
            journal.record(EventRow(life=1, rank=0, kind="failed", message="rank 1 was killed (SIGKILL)"))
            journal.record(EventRow(life=1, rank=0, kind="started", message="All ranks continue."))
            journal.record(FailureRow(life=0, iteration=92, checkpoint_iteration=50, description="killed"))
            journal.record(
                RecoveryRow(
                    id="r",
                    life=1,
                    failure_iteration=92,
                    checkpoint_iteration=50,
                    restored_iteration=92,
                    method="line",
                    requested_mode="predict",
                    reason="gain 2.38",
                    guard={"loss": math.nan},
                )
            )
            journal.record(CheckpointRow(life=1, iteration=100, status="failed", reason="disk full"))
        journal.close()
    return tmp_path


def test_inspect_shows_lives_checkpoints_and_recoveries(run_dir: Path) -> None:
    code, output, _ = cpsr("inspect", run_dir)
    assert code == 0
    for words in ("killed", "running", "scratch", "2,048", "0.012", "disk full", "line", "kept"):
        assert words in output


def test_inspect_names_the_rank_that_failed_and_what_was_said_of_the_recovery(run_dir: Path) -> None:
    _, output, _ = cpsr("inspect", run_dir)
    words = " ".join(output.replace("│", " ").split())
    assert "rank 1 was killed" in words
    assert "Life 1: All ranks continue. (gain 2.38)" in words


def test_inspect_json_has_everything(run_dir: Path) -> None:
    code, output, _ = cpsr("inspect", run_dir, "--json")
    data = json.loads(output, parse_constant=pytest.fail)
    assert code == 0
    assert [(life["life"], life["ranks"]) for life in data["lives"]] == [(0, 4), (1, 3)]
    assert [row["status"] for row in data["checkpoints"]] == ["committed", "failed"]
    assert (data["recoveries"][0]["method"], data["recoveries"][0]["guard"]) == ("line", {"loss": "nan"})
    assert data["failures"][0]["iteration"] == 92
    assert data["plans"][0]["interval_iterations"] == 50


def test_inspect_says_which_checkpoints_it_left_out(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.start_life("auto")
    for iteration in range(1, 31):
        journal.record(CheckpointRow(life=0, iteration=1000 + iteration, status="committed"))
    journal.close()
    output = cpsr("inspect", tmp_path)[1]
    assert "Newest 20 of 30 checkpoints" in output
    assert "1030" in output
    assert "1010" not in output
    assert "No recovery so far." in output
