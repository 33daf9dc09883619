"""Where checkpoints are, by real files in shared memory and the events that the copier writes."""

import json
import sqlite3
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.checkpoint.manifest import COMMIT, THINNED, step_name
from cpsr.checkpoint.memory_removal import remove_memory_states
from cpsr.checkpoint.memory_states import SHARED_MEMORY
from cpsr.journal import CheckpointRow, EventRow, Journal
from tests.checkpoint.test_memory import hold
from tests.service.journals import flushed


@pytest.fixture
def run_id(tmp_path: Path) -> Iterator[str]:
    name = f"test-{uuid.uuid4().hex}"
    (tmp_path / "run.json").write_text(json.dumps({"run_id": name, "world_size": 2, "mode": "auto"}))
    yield name
    remove_memory_states(name)


def commit(journal: Journal, iteration: int, at: float, life: int = 0) -> None:
    journal.record(
        CheckpointRow(life=life, iteration=iteration, status="committed", bytes=5000, created_unix_seconds=at)
    )


def say(journal: Journal, kind: str, iteration: int, at: float) -> None:
    journal.record(EventRow(life=0, rank=0, kind=kind, message="", iteration=iteration, created_unix_seconds=at))


def copies(client: TestClient) -> dict[int, list[dict[str, Any]]]:
    """Of the newest row of each iteration."""
    rows = client.get("/checkpoints").json()["checkpoints"]
    return {row["iteration"]: row["copies"] for row in reversed(rows)}


def test_what_the_run_directory_holds_has_its_size(tmp_path: Path, journal: Journal, client: TestClient) -> None:
    for iteration, names in ((20, (COMMIT, THINNED)), (30, (COMMIT,)), (40, ())):
        commit(journal, iteration, iteration)
        step = tmp_path / "checkpoints" / step_name(iteration)
        step.mkdir(parents=True)
        for name in names:
            (step / name).write_bytes(b"x" * 100)
    journal.record(CheckpointRow(life=0, iteration=30, status="skipped"))
    flushed(journal)
    found = copies(client)
    (thinned,), (whole,) = found[20], client.get("/checkpoints").json()["checkpoints"][2]["copies"]
    assert (thinned["tier"], thinned["holds"], thinned["bytes"], thinned["verified"]) == ("disk", "weights", 200, True)
    assert (whole["holds"], whole["bytes"], whole["ranks"]) == ("whole", 100, None)
    assert (found[30], found[40]) == ([], []), "neither the skipped one nor what has gone is anywhere"


def test_copies_at_the_target_are_those_that_were_made_and_not_removed(journal: Journal, client: TestClient) -> None:
    for iteration in (10, 20, 30, 40, 50):
        commit(journal, iteration, iteration)
    for iteration in (10, 20, 30, 50):
        say(journal, "target copied", iteration, iteration + 1)
    say(journal, "target removed", 10, 35)
    say(journal, "target set aside", 20, 36)
    say(journal, "target copy damaged", 50, 52)
    flushed(journal)
    found = copies(client)
    (copied,) = found.pop(30)
    assert (copied["tier"], copied["bytes"], copied["verified"]) == ("target", 5000, True)
    assert copied["copied_unix_seconds"] == 31
    assert found == {10: [], 20: [], 40: [], 50: []}


def test_a_copy_is_of_the_newest_checkpoint_of_its_iteration(
    tmp_path: Path, journal: Journal, client: TestClient
) -> None:
    """After a restart the same iteration is saved again."""
    commit(journal, 10, 1.0)
    say(journal, "target copied", 10, 2.0)
    commit(journal, 10, 3.0, life=1)
    flushed(journal)
    rows = client.get("/checkpoints").json()["checkpoints"]
    assert [row["copies"] for row in rows] == [[], []], "the copy is of the one before, which is the run's no more"
    say(journal, "target copied", 10, 4.0)
    flushed(journal)
    rows = client.get("/checkpoints").json()["checkpoints"]
    assert [len(row["copies"]) for row in rows] == [1, 0]


def test_host_memory_of_this_machine_is_looked_into(
    tmp_path: Path, journal: Journal, client: TestClient, run_id: str
) -> None:
    commit(journal, 7, 1.0)
    commit(journal, 8, 2.0)
    flushed(journal)
    assert copies(client) == {7: [], 8: []}
    stored = hold(run_id, iteration=7)
    (own,) = copies(client)[7]
    assert (own["tier"], own["holds"], own["ranks"], own["verified"]) == ("memory", "whole", [0], False)
    assert own["bytes"] == stored.path.stat().st_size
    replica = SHARED_MEMORY / f"cpsr-{run_id}-rank-00000-replica-00001-0"
    replica.write_bytes(stored.path.read_bytes())
    assert [one["tier"] for one in copies(client)[7]] == ["memory", "peer"]
    assert copies(client)[8] == []
    content = stored.path.read_bytes()
    stored.path.write_bytes(content[:8] + b"\1" + content[9:])  # it is being written
    replica.unlink()
    assert copies(client)[7] == []
    assert client.get("/checkpoints").json()["memory_seen"] is True


def test_a_state_of_another_life_is_not_that_checkpoint(journal: Journal, client: TestClient, run_id: str) -> None:
    commit(journal, 7, 1.0)
    flushed(journal)
    hold(run_id, iteration=7, life=3)
    assert copies(client)[7] == []


def test_of_a_run_on_another_machine_no_memory_is_reported(
    tmp_path: Path, journal: Journal, client: TestClient, run_id: str
) -> None:
    commit(journal, 7, 1.0)
    flushed(journal)
    hold(run_id, iteration=7)
    with sqlite3.connect(tmp_path / "journal.db") as connection:
        connection.execute("UPDATE lives SET host = 'another'")
    body = client.get("/checkpoints").json()
    assert (body["memory_seen"], body["checkpoints"][0]["copies"]) == (False, [])
