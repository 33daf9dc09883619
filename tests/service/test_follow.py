import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.journal import CheckpointRow, EventRow, Journal
from cpsr.service.follow import FOLLOWED, ROWS_AT_ONCE, News, Place, end_of, recorded_after, start_of
from tests.service.journals import ROWS, flushed, record_event, record_steps

NUMBERS = st.integers(0, 10**18 - 1)


@given(st.integers(0, 2**60), st.integers(0, 2**59), st.lists(NUMBERS, min_size=len(FOLLOWED), max_size=len(FOLLOWED)))
def test_a_place_survives_its_text(journal: int, opened: int, rows: list[int]) -> None:
    place = Place(f"{journal:x}", opened, tuple(rows))
    assert Place.parse(str(place)) == place


@given(st.text() | st.from_regex(r"[0-9a-f]+-[0-9a-f]+-[0-9.]*"))
def test_what_is_no_place_is_none_or_reads_back(text: str) -> None:
    place = Place.parse(text)
    assert place is None or Place.parse(str(place)) == place


def everything(run_dir: Path) -> News:
    return recorded_after(run_dir, start_of(end_of(run_dir)))


def test_every_row_is_sent_once_in_the_order_of_its_time(tmp_path: Path, journal: Journal) -> None:
    for place, record in enumerate(ROWS.values()):
        record(journal, float(len(ROWS) - place))
    journal.record(EventRow(life=0, rank=1, kind="x", message="y", created_unix_seconds=0.5))
    record_steps(journal)
    flushed(journal)
    news = everything(tmp_path)
    rows, step = news.rows, news.step
    assert [row.name for row in rows] == [
        "event",
        "plan",
        "bubble",
        "backtest",
        "fit",
        "phase",
        "recovery",
        "failure",
        "checkpoint",
    ]
    assert step is not None
    assert (step["iteration"], news.reset) == (7, "")
    assert "explanation" not in rows[1].content
    assert rows[-1].place == end_of(tmp_path)
    for seen in range(len(rows)):
        after = recorded_after(tmp_path, rows[seen].place)
        assert after.begin == rows[seen].place
        assert [row.content for row in after.rows] == [row.content for row in rows[seen + 1 :]]


def test_much_is_sent_in_pieces_without_a_gap_whatever_the_clocks_say(tmp_path: Path, journal: Journal) -> None:
    count = 2 * ROWS_AT_ONCE + 7
    for number in range(count):
        backwards = float(count - number)
        journal.record(EventRow(life=0, rank=0, kind="x", message=str(number), created_unix_seconds=backwards))
        journal.record(CheckpointRow(life=0, iteration=number, status="skipped", created_unix_seconds=number))
    flushed(journal)
    place, sent = start_of(end_of(tmp_path)), []
    for _ in range(3):
        rows = recorded_after(tmp_path, place).rows
        sent += [(row.name, row.content.get("message", row.content["iteration"])) for row in rows]
        place = rows[-1].place
    assert recorded_after(tmp_path, place).rows == []
    assert [message for name, message in sent if name == "event"] == [str(number) for number in range(count)]
    assert [at for name, at in sent if name == "checkpoint"] == list(range(count))


def test_of_another_journal_in_its_place_everything_is_sent(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    record_event(journal, "old")
    journal.close()
    place = end_of(tmp_path)
    for file in tmp_path.glob("journal.db*"):
        file.unlink()
    again = Journal.open(tmp_path / "journal.db")
    record_event(again, "new")
    again.close()
    news = recorded_after(tmp_path, place)
    assert "another" in news.reset
    assert [row.content["message"] for row in news.rows] == ["new"]
    assert recorded_after(tmp_path, news.rows[-1].place) == News(news.rows[-1].place, "", [], None)


def messages(news: News) -> list[str]:
    return [row.content["message"] for row in news.rows]


def after_a_power_cut(run_dir: Path, journal: Journal) -> Path:
    """The run as another machine finds it: what was written last has never reached the disk.

    Args:
        run_dir: of the run; `journal` writes to it, and has not moved its write-ahead log into the file.
        journal: records two more events than are left.
    """
    record_event(journal, "kept")
    flushed(journal)
    left = (run_dir / "journal.db-wal").stat().st_size
    for message in ("lost", "lost too"):
        record_event(journal, message)
        flushed(journal)
    copied = run_dir.with_name(f"{run_dir.name}-after-the-cut")
    copied.mkdir()
    shutil.copy(run_dir / "journal.db", copied)
    log = (run_dir / "journal.db-wal").read_bytes()
    (copied / "journal.db-wal").write_bytes(log[: left + 100])  # torn within the next record
    return copied


@pytest.mark.parametrize(("new_rows", "clock_seconds"), [(1, 0.0), (5, 0.0), (1, -3600.0), (5, -3600.0)])
def test_rows_that_a_power_cut_took_are_sent_anew_under_their_numbers(
    tmp_path: Path, journal: Journal, new_rows: int, clock_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the journal has grown beyond what was sent before, and where the clock has gone back."""
    copied = after_a_power_cut(tmp_path, journal)
    first = everything(tmp_path)
    assert messages(first) == ["kept", "lost", "lost too"]
    seen = first.rows[-1].place
    assert recorded_after(copied, seen).rows == [], "nobody has written since"
    now_seconds = time.time() + clock_seconds
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: now_seconds)
        again = Journal.open(copied / "journal.db")
    again.start_life("auto", after=0)
    for number in range(new_rows):
        record_event(again, f"new {number}")
    again.close()
    news = recorded_after(copied, seen)
    assert "lost its last rows" in news.reset
    assert news.begin.rows == first.rows[0].place.rows
    assert messages(news) == [f"new {number}" for number in range(new_rows)]
    assert recorded_after(copied, news.rows[-1].place).reset == ""


def test_a_restart_that_has_lost_nothing_is_no_reset(tmp_path: Path) -> None:
    first = Journal.open(tmp_path / "journal.db")
    record_event(first, "a")
    first.close()
    seen = end_of(tmp_path)
    for message in ("b", "c"):
        later = Journal.open(tmp_path / "journal.db")
        record_event(later, message)
        later.close()
    news = recorded_after(tmp_path, seen)
    assert (news.reset, messages(news)) == ("", ["b", "c"])
    assert news.begin.opened > seen.opened
