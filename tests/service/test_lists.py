"""What all lists have in common: the newest first, at most so many, in a range of time."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.checkpoint.manifest import COMMIT, THINNED, step_name
from cpsr.journal import CheckpointRow, FitRow, Journal
from tests.service.journals import ROWS, error_of, flushed

TIMES = {"/failures": "failed_unix_seconds", "/plan/history": "planned_unix_seconds"}


def times(path: str, body: dict[str, Any]) -> list[float]:
    (rows,) = (value for value in body.values() if isinstance(value, list))
    return [row[TIMES.get(path, "created_unix_seconds")] for row in rows]


@pytest.mark.parametrize("path", ROWS)
def test_the_newest_first_in_a_range_of_time(client: TestClient, journal: Journal, path: str) -> None:
    empty = client.get(path).json()
    assert (times(path, empty), empty["total"]) == ([], 0)
    for at in (1.0, 2.0, 3.0, 4.0):
        ROWS[path](journal, at)
    flushed(journal)
    everything = client.get(path).json()
    assert (times(path, everything), everything["total"]) == ([4.0, 3.0, 2.0, 1.0], 4)
    middle = client.get(path, params={"since_unix_seconds": 2.0, "until_unix_seconds": 4.0}).json()
    assert (times(path, middle), middle["total"]) == ([3.0, 2.0], 2)
    one = client.get(path, params={"until_unix_seconds": 4.0, "limit": 1}).json()
    assert (times(path, one), one["total"]) == ([3.0], 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"limit": 1001},
        {"limit": "many"},
        {"since_unix_seconds": -1.0},
        {"since_unix_seconds": "nan"},
        {"since_unix_seconds": 5.0, "until_unix_seconds": 4.0},
    ],
    ids=str,
)
def test_a_range_that_makes_no_sense_is_refused(client: TestClient, wrong: dict[str, Any]) -> None:
    for path in ROWS:
        assert error_of(client.get(path, params=wrong), 422)["code"] == "bad_request", path


def test_without_a_journal_each_says_so(client: TestClient) -> None:
    for path in ROWS:
        assert error_of(client.get(path), 503)["code"] == "journal_unavailable", path


def test_fits_of_one_kind(client: TestClient, journal: Journal) -> None:
    for kind in ("loss", "failure_rate", "loss"):
        journal.record(FitRow(life=0, iteration=1, kind=kind, result={}))
    flushed(journal)
    body = client.get("/fits", params={"kind": "loss"}).json()
    assert ([fit["kind"] for fit in body["fits"]], body["total"]) == (["loss", "loss"], 2)
    error_of(client.get("/fits", params={"kind": "other"}), 422)


def test_checkpoints_say_what_is_left_of_them(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    for iteration in (10, 20, 30, 40):
        journal.record(CheckpointRow(life=0, iteration=iteration, status="committed", bytes=1))
    journal.record(CheckpointRow(life=0, iteration=50, status="skipped", reason="slow disk"))
    flushed(journal)
    for iteration, names in ((20, (COMMIT, THINNED)), (30, (COMMIT,)), (40, ())):
        step = tmp_path / "checkpoints" / step_name(iteration)
        step.mkdir(parents=True)
        for name in names:
            (step / name).touch()
    rows = client.get("/checkpoints").json()["checkpoints"]
    copies = {row["iteration"]: (row["on_disk"], row["verified"]) for row in rows}
    assert copies == {
        10: ("none", True),
        20: ("weights", True),
        30: ("whole", True),
        40: ("none", True),
        50: ("none", False),
    }
