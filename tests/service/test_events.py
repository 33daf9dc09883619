"""Rows of the journal behind an id."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import CheckpointRow, Journal
from cpsr.service import events as events_module
from cpsr.service.app import create_app
from tests.service.conftest import BASE_URL
from tests.service.journals import ROWS, flushed, record_event


def ask(client: TestClient, after: str | None = None) -> dict[str, Any]:
    reply = client.get("/events", params={} if after is None else {"after": after})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def messages(found: dict[str, Any]) -> list[str | None]:
    return [one["data"].get("message") for one in found["events"]]


def test_every_row_is_given_once_in_the_order_of_recording(
    client: TestClient, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "ROWS_AT_ONCE", 4)
    journal.record(*ROWS)
    record_event(journal, "last")
    journal.record(*[CheckpointRow(life=0, iteration=at, status="skipped") for at in range(5)])
    flushed(journal)
    found, after = [], "start"
    while True:
        part = ask(client, after)
        assert not part["reset"]
        found += part["events"]
        after = part["after"]
        if not part["more"]:
            break
    kinds = ["life", "checkpoint", "failure", "recovery", "phase", "fit", "bubble", "plan", "event"]
    assert [one["event"] for one in found] == [*kinds, *["checkpoint"] * 5]
    assert [one["row"] for one in found] == list(range(1, len(found) + 1))
    assert "explanation" not in found[7]["data"]
    assert ask(client, after)["events"] == []


def test_a_client_goes_on_where_it_was(client: TestClient, journal: Journal) -> None:
    record_event(journal, "before")
    flushed(journal)
    began = ask(client)
    assert began["events"] == []
    record_event(journal, "first")
    record_event(journal, "second")
    flushed(journal)
    found = ask(client, began["after"])
    assert messages(found) == ["first", "second"]


@pytest.mark.parametrize("after", ["1-0123456789abcdef", "99-", "nonsense"])
def test_an_id_of_another_journal_begins_anew_and_says_so(client: TestClient, journal: Journal, after: str) -> None:
    record_event(journal, "before")
    flushed(journal)
    found = ask(client, after)
    assert (found["reset"], messages(found)) == (True, [None, "before"])


def test_rows_that_a_power_cut_took_are_given_anew_under_their_numbers(tmp_path: Path, journal: Journal) -> None:
    record_event(journal, "kept")
    flushed(journal)
    left = (tmp_path / "journal.db-wal").stat().st_size
    for message in ("lost", "lost too"):
        record_event(journal, message)
        flushed(journal)
    before = ask(TestClient(create_app(tmp_path), base_url=BASE_URL), "start")
    assert messages(before)[1:] == ["kept", "lost", "lost too"]
    copied = tmp_path.with_name(f"{tmp_path.name}-after-the-cut")
    copied.mkdir()
    shutil.copy(tmp_path / "journal.db", copied)
    log = (tmp_path / "journal.db-wal").read_bytes()
    (copied / "journal.db-wal").write_bytes(log[: left + 100])  # torn within the next record
    again = Journal.open(copied / "journal.db")
    for message in ("new", "newer"):
        record_event(again, message)
    again.close()
    anew = ask(TestClient(create_app(copied), base_url=BASE_URL), before["after"])
    assert (anew["reset"], messages(anew)[1:]) == (True, ["kept", "new", "newer"])
