from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.journal import CheckpointRow, EventRow, Journal
from cpsr.service.follow import FOLLOWED, ROWS_AT_ONCE, Place, end_of, recorded_after
from tests.service.journals import ROWS, flushed, record_event, record_steps, rehearsal_row

NUMBERS = st.integers(0, 10**18 - 1)


@given(st.integers(0, 2**60), st.lists(NUMBERS, min_size=len(FOLLOWED), max_size=len(FOLLOWED)))
def test_a_place_survives_its_text(journal: int, rows: list[int]) -> None:
    place = Place(f"{journal:x}", tuple(rows))
    assert Place.parse(str(place)) == place


@given(st.text() | st.from_regex(r"[0-9a-f]+-[0-9.]*"))
def test_what_is_no_place_is_none_or_reads_back(text: str) -> None:
    place = Place.parse(text)
    assert place is None or Place.parse(str(place)) == place


def start_of(run_dir: Path) -> Place:
    return Place(end_of(run_dir).journal, (0,) * len(FOLLOWED))


def test_every_row_is_told_once_in_the_order_of_its_time(tmp_path: Path, journal: Journal) -> None:
    for place, record in enumerate(ROWS.values()):
        record(journal, float(len(ROWS) - place))
    journal.record_event(EventRow(life=0, rank=1, kind="x", message="y", created_unix_seconds=0.5))
    record_steps(journal)
    flushed(journal)
    rows, step, other = recorded_after(tmp_path, start_of(tmp_path))
    assert [row.name for row in rows] == [
        "event",
        "plan",
        "backtest",
        "fit",
        "phase",
        "rehearsal",
        "recovery",
        "failure",
        "checkpoint",
    ]
    assert step is not None
    assert (step["iteration"], other) == (7, False)
    assert "explanation" not in rows[1].content
    assert rows[-1].place == end_of(tmp_path)
    for seen in range(len(rows)):
        after, _, _ = recorded_after(tmp_path, rows[seen].place)
        assert [row.content for row in after] == [row.content for row in rows[seen + 1 :]]


def test_much_is_told_in_pieces_without_a_gap_whatever_the_clocks_say(tmp_path: Path, journal: Journal) -> None:
    count = 2 * ROWS_AT_ONCE + 7
    for number in range(count):
        backwards = float(count - number)
        journal.record_event(EventRow(life=0, rank=0, kind="x", message=str(number), created_unix_seconds=backwards))
        journal.record_checkpoint(
            CheckpointRow(life=0, iteration=number, status="skipped", created_unix_seconds=number)
        )
    flushed(journal)
    place, told = start_of(tmp_path), []
    for _ in range(3):
        rows, _, _ = recorded_after(tmp_path, place)
        told += [(row.name, row.content.get("message", row.content["iteration"])) for row in rows]
        place = rows[-1].place
    assert recorded_after(tmp_path, place)[0] == []
    assert [message for name, message in told if name == "event"] == [str(number) for number in range(count)]
    assert [at for name, at in told if name == "checkpoint"] == list(range(count))


def test_how_a_rehearsal_ended_is_told_to_who_has_seen_it_begin(tmp_path: Path, journal: Journal) -> None:
    journal.record_rehearsal(rehearsal_row(id="d", outcome="running"))
    flushed(journal)
    rows, _, _ = recorded_after(tmp_path, start_of(tmp_path))
    journal.record_rehearsal(rehearsal_row(id="d", outcome="refused"))
    flushed(journal)
    ended, _, _ = recorded_after(tmp_path, rows[-1].place)
    assert [row.content["outcome"] for row in ended] == ["refused"]


def test_another_journal_in_its_place_is_noticed(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    record_event(journal, "old")
    journal.close()
    place = end_of(tmp_path)
    for file in tmp_path.glob("journal.db*"):
        file.unlink()
    again = Journal.open(tmp_path / "journal.db")
    record_event(again, "new")
    again.close()
    rows, _, other = recorded_after(tmp_path, place)
    assert (rows, other) == ([], True)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_an_older_journal_is_followed(tmp_path: Path, version: int) -> None:
    from tests.test_journal import older_file

    older_file(tmp_path / "journal.db", version)
    rows, step, _ = recorded_after(tmp_path, start_of(tmp_path))
    assert ([row.name for row in rows], step) == (["plan"], None)
