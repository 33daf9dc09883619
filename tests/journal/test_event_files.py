"""Events of other ranks, which rank 0 reads from their event files."""

import os
from pathlib import Path

import pytest

from cpsr.journal import EventFile, EventRow, Journal, JournalReader

FLUSH_SECONDS = 20.0


def event(number: int, rank: int = 1) -> EventRow:
    return EventRow(
        life=0, rank=rank, kind="note", message=f"line {number}", iteration=number, created_unix_seconds=number
    )


def test_event_lines_arrive_exactly_once(path: Path, journal: Journal) -> None:
    directory = path.parent / "events"
    files = [EventFile(directory / f"rank-{rank:05}.jsonl") for rank in (1, 2)]
    recorded = []
    for round_ in range(3):
        for rank, file in enumerate(files, 1):
            row = event(round_, rank)
            file.record(row)
            recorded.append(row)
        journal.import_events(directory)
        journal.import_events(directory)
        assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.events() == recorded
    journal.close()
    again = Journal.open(path)
    again.import_events(directory)
    again.close()
    with JournalReader(path) as reader:
        assert reader.events() == recorded


def test_a_torn_tail_waits_and_a_damaged_line_is_named(path: Path, journal: Journal) -> None:
    file = EventFile(path.parent / "events" / "rank-00007.jsonl")
    file.record(*map(event, range(3)))
    lines = [line for line in file.path.read_bytes().splitlines(keepends=True) if line.strip()]
    file.path.write_bytes(lines[0] + lines[1].replace(b'"kind"', b'"kinc"') + lines[2][:-10])
    journal.import_events(file.path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        first, damage = reader.events()
    assert first == event(0)
    assert (damage.kind, damage.rank) == ("event_file_damaged", 7)
    assert f"rank-00007.jsonl has a damaged line near byte {len(lines[0])}" in damage.message
    with file.path.open("ab") as tail:
        tail.write(lines[2][-10:])
    journal.import_events(file.path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        assert reader.events()[2:] == [event(2)]


def test_a_line_after_a_torn_one_is_kept(path: Path, journal: Journal) -> None:
    file_path = path.parent / "events" / "rank-00001.jsonl"
    file_path.parent.mkdir()
    file_path.write_bytes(b"0123456789abcdef {torn by a ki")
    file = EventFile(file_path)
    file.record(event(1))
    journal.import_events(file_path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        damage, kept = reader.events()
    assert "a damaged line near byte 0" in damage.message
    assert kept == event(1)


def test_an_event_file_that_lost_its_tail_is_reported_and_not_imported_twice(path: Path, journal: Journal) -> None:
    file = EventFile(path.parent / "events" / "rank-00001.jsonl")
    file.record(*map(event, range(3)))
    journal.import_events(file.path.parent)
    assert journal.flush(FLUSH_SECONDS)
    os.truncate(file.path, file.path.stat().st_size // 3)
    journal.import_events(file.path.parent)
    assert journal.flush(FLUSH_SECONDS)
    file.record(event(3))
    journal.import_events(file.path.parent)
    assert journal.flush(FLUSH_SECONDS)
    with JournalReader(path) as reader:
        messages = [row.message for row in reader.events()]
    assert messages[:3] == ["line 0", "line 1", "line 2"]
    assert "lost its tail" in messages[3]
    assert messages[4:] == ["line 3"]


def test_an_event_file_on_a_full_disk_reports_once_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    file = EventFile(Path("/dev/full"))
    file.record(*map(event, range(3)))
    (failure,) = caplog.messages
    assert "No space left" in failure
