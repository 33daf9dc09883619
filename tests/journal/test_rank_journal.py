"""What one rank records in the journal, also where the disk has no room for it."""

import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cpsr.errors import JournalError
from cpsr.journal import (
    CheckpointRow,
    EventFile,
    EventRow,
    Journal,
    JournalReader,
    RecoveryRow,
    StepRow,
    open_journal,
    writer,
)
from cpsr.journal.events import import_events
from cpsr.life.outcome import losses_before
from cpsr.ranks.group import Group


def step(iteration: int) -> StepRow:
    return StepRow(life=0, iteration=iteration, loss=2.0, learning_rate=1e-3, seconds=0.5)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a megabyte and few files."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=32", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves no byte to others."""
    with (disk / "fill").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return disk / "fill"


@pytest.mark.parametrize(("lives_before", "trained"), [(0, -1), (1, 0), (3, 0)])
def test_a_life_begins_on_a_full_disk_and_its_rows_follow(
    small_disk: Path, lives_before: int, trained: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after lives that never came to train, of which the journal alone knows."""
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.02)
    run_dir = small_disk / "run"
    for _ in range(lives_before):
        open_journal(run_dir, Group(), "auto").close("clean")
    filler = fill(small_disk)
    journal = open_journal(run_dir, Group(), "auto", trained)
    assert journal.life == lives_before
    assert "training goes on without" in caplog.text
    journal.record(step(1))
    assert losses_before(journal, 1) == []
    filler.unlink()
    journal.flush(20.0)
    journal.close("clean")
    with JournalReader(run_dir / "journal.db") as reader:
        assert [life.ending for life in reader.lives()] == ["clean"] * (lives_before + 1)
        assert [step.iteration for step in reader.losses()] == [1]
        assert [event.kind for event in reader.events()] == ["journal_late"]


def take_every_file(disk: Path) -> list[Path]:
    """The files after which the disk can have no more."""
    made = []
    with suppress(OSError):
        for number in count():
            made.append(disk / str(number))
            made[-1].touch()
    return made[:-1]


@pytest.mark.parametrize("lives_before", [0, 2])
@pytest.mark.parametrize("free", [0, 1])
def test_a_life_begins_where_no_file_can_be_made(
    small_disk: Path, lives_before: int, free: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The journal, its log and its index are up to three; their bytes would have room."""
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.02)
    run_dir = small_disk / "run"
    run_dir.mkdir()
    for _ in range(lives_before):
        open_journal(run_dir, Group(), "auto").close("clean")
    made = take_every_file(small_disk)
    for path in made[:free]:
        path.unlink()
    journal = open_journal(run_dir, Group(), "auto")
    assert journal.life == lives_before
    assert "training goes on without" in caplog.text
    for path in made[free:]:
        path.unlink()
    journal.flush(20.0)
    journal.close("clean")
    with JournalReader(run_dir / "journal.db") as reader:
        assert [life.ending for life in reader.lives()] == ["clean"] * (lives_before + 1)
    assert list(run_dir.glob(".room-*")) == []


def test_a_journal_that_is_none_is_still_refused_where_files_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "journal.db").mkdir()
    with pytest.raises(JournalError, match="SQLITE_CANTOPEN"):
        open_journal(tmp_path, Group(), "auto")


def test_a_late_journal_keeps_its_life_and_recoveries_however_much_waits(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(writer, "RECORD_WRITES_MAX", 10)
    path = small_disk / "run" / "journal.db"
    filler = fill(small_disk)
    journal = Journal.open(path)
    life = journal.start_life("auto")
    journal.record(
        RecoveryRow(
            id="r",
            life=life,
            failure_iteration=9,
            checkpoint_iteration=5,
            restored_iteration=5,
            method="stale",
            requested_mode="auto",
            feasible=["exact"],
            reason="z",
        )
    )
    journal.update_recovery("r", "rolled_back", {})
    for iteration in range(50):
        journal.record(CheckpointRow(life=life, iteration=iteration, status="failed", reason="full"))
        journal.import_events(path.parent / "events")
    filler.unlink()
    assert journal.flush(20.0)
    journal.end_life("clean")
    journal.close()
    assert journal.dropped_rows == 40, "of what may be dropped, as much is kept as before there were imports"
    with JournalReader(path) as reader:
        assert [(one.life, one.ending, one.restored_iteration) for one in reader.lives()] == [(life, "clean", 5)]
        assert [row.outcome for row in reader.recoveries()] == ["rolled_back"]
        assert [row.iteration for row in reader.checkpoints()] == list(range(40, 50))
        assert [event.kind for event in reader.events()] == ["journal_late", "journal_rows_dropped"]


def test_one_import_waits_for_the_file_however_often_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = []

    def counted(*arguments: Any) -> None:
        imports.append(arguments)
        import_events(*arguments)

    monkeypatch.setattr(writer, "import_events", counted)
    path, directory = tmp_path / "journal.db", tmp_path / "events"
    journal = Journal.open(path)
    journal.start_life("auto")
    file = EventFile(directory / "rank-00001.jsonl")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for number in range(20):
            file.append(EventRow(life=0, rank=1, kind="x", message=str(number)))
            journal.import_events(directory)
        other.execute("ROLLBACK")
    assert journal.flush(20.0)
    assert len(imports) <= 2, "one that the thread had taken already, and one that waited"
    journal.close()
    file.close()
    with JournalReader(path) as reader:
        assert [event.message for event in reader.events()] == [str(number) for number in range(20)]


def test_an_event_file_is_made_once_there_is_room_for_it(small_disk: Path) -> None:
    """Where the disk can have no more files."""
    made = take_every_file(small_disk)
    row = EventRow(life=0, rank=1, kind="x", message="y")
    file = EventFile(small_disk / "events" / "rank-00001.jsonl")
    file.append(row)
    (failure,) = file.failures()
    assert "No space left" in failure
    assert file.failed_appends == 2
    for path in made[:2]:
        path.unlink()
    file.append(row)
    file.close()
    assert file.path.read_text().count("\n") == 1
