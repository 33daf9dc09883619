"""The parts of a restart add up to the whole way, and what processes note is real."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cpsr.demo.notes import Notes, process_started_unix_seconds, read_notes
from cpsr.demo.timeline import Part, Restart, restart
from cpsr.journal import RecoveryRow

RECOVERY = RecoveryRow(
    id="a",
    life=1,
    failure_iteration=442,
    checkpoint_iteration=400,
    restored_iteration=442,
    method="vitp",
    requested_mode="predict",
    load_seconds=0.03,
    predict_seconds=0.25,
    inject_seconds=0.12,
)
REACHED = {
    "started": 101.5,
    "frameworks imported": 104.0,
    "CPSR imported": 104.5,
    "job set up": 106.0,
    "run opened": 107.0,
    "restored state evaluated": 107.25,
    "first step done": 107.75,
}


def test_the_parts_follow_each_other_from_the_kill_to_the_first_step() -> None:
    found = restart(100.0, 100.25, REACHED, RECOVERY)
    assert found.seconds == pytest.approx(7.75)
    assert found.ours_seconds == pytest.approx(0.25 + 0.5 + 1.0)
    assert [part.seconds for part in found.parts] == pytest.approx(
        [0.25, 1.25, 2.5, 0.5, 1.5, 0.6, 0.03, 0.25, 0.12, 0.25, 0.5]
    )
    assert all(found.aims.values())


def test_where_nobody_noted_the_end_the_first_two_parts_are_one() -> None:
    found = restart(100.0, None, REACHED, RECOVERY)
    assert found.seconds == pytest.approx(7.75)
    assert found.parts[0].seconds == pytest.approx(1.5)
    assert len(found.parts) == 10


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"), [(8.5, 1.0, [True, True]), (8.5, 1.5, [False, True]), (1.0, 2.0, [True, False])]
)
def test_an_aim_is_met_or_missed(theirs: float, ours: float, expected: list[bool]) -> None:
    found = Restart((Part("launcher", theirs), Part("CPSR", ours, ours=True)))
    assert list(found.aims) == ["below 10 s", "CPSR's own below 2 s"]
    assert list(found.aims.values()) == expected


def test_the_last_rank_counts(tmp_path: Path) -> None:
    Notes({"started": 1.0, "run opened": 5.0}).write(tmp_path, rank=0)
    Notes({"started": 2.0, "run opened": 4.0}).write(tmp_path, rank=1)
    assert read_notes(tmp_path, ranks=2) == {"started": 2.0, "run opened": 5.0}
    with pytest.raises(FileNotFoundError, match="resumed-2"):
        read_notes(tmp_path, ranks=3)


def test_a_note_is_the_time_at_which_it_is_made() -> None:
    notes = Notes()
    before = time.time()
    notes.add("here")
    assert before <= notes.unix_seconds["here"] <= time.time()


def test_a_process_knows_when_it_was_started(tmp_path: Path) -> None:
    program = (
        "import time; time.sleep(0.3); from cpsr.demo.notes import process_started_unix_seconds as started; "
        "print(started())"
    )
    before = time.time()
    child = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    ended = time.time()
    # The clock of process starts ticks a hundred times a second.
    assert before - 0.02 <= json.loads(child.stdout) <= ended - 0.3
    assert process_started_unix_seconds() < before
