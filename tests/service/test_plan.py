"""The plan, what-if previews and overrides."""

import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import CheckpointRow, Journal, latest_override
from cpsr.planner.plan import fixed_plan
from cpsr.planner.planning import make_plan
from tests.service.journals import (
    LIMITS,
    error_of,
    flushed,
    measured_inputs,
    measured_plan,
    plan_row,
    record_steps,
    recovery_row,
)


def test_plan_with_everything(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "gpt", "mode": "auto", "world_size": 2}')
    journal.end_life("clean")
    journal.start_life("predict", ranks=2)
    journal.record(plan_row())
    record_steps(journal)
    journal.record(CheckpointRow(life=0, iteration=50, status="committed", bytes=1234))
    journal.record(CheckpointRow(life=0, iteration=100, status="skipped", reason="slow disk"))
    journal.record(recovery_row(life=1, origin="predicted"))
    flushed(journal)
    body = client.get("/plan").json()
    assert body["recovery_mode"] == "recompute"
    assert (body["run_id"], body["ranks"], body["mode"], body["last_iteration"]) == ("gpt", 2, "predict", 7)
    assert (body["iteration_seconds"], body["override"], body["warnings"]) == (1.5, None, [])
    assert (body["interval_iterations"], body["interval_seconds"], body["origin"]) == (139, 139 * 1.5, "young")
    assert body["from_iteration"] == 20
    assert body["explanation"]["inputs"]["stall_seconds"] == 0.5
    assert set(body["explanation"]["rivals"]) >= {"young", "daly"}
    assert (body["newest_checkpoint"]["iteration"], body["newest_checkpoint"]["bytes"]) == (50, 1234)
    assert (body["last_recovery"]["method"], body["last_recovery"]["guard"]) == ("line", {"probe_loss_nats": "nan"})
    assert body["last_recovery"]["sources"] == [{"rank": 1, "source": "disk", "iteration": 50}]
    assert body["descends_from_predicted"]


@pytest.mark.parametrize(
    ("checkpoint", "recovery", "descends"),
    [
        (None, None, False),
        ((0, "predicted"), None, False),  # of a run without a recovery, which has no such checkpoint
        ((0, "trained"), (1, "predicted"), True),
        ((0, "predicted"), (1, "trained"), False),  # the restart went back before it
        ((1, "trained"), (1, "predicted"), False),
        ((1, "predicted"), (1, "trained"), True),
        (None, (1, "predicted"), True),
    ],
)
def test_descent_from_a_predicted_state(
    client: TestClient,
    journal: Journal,
    checkpoint: tuple[int, Any] | None,
    recovery: tuple[int, Any] | None,
    descends: bool,
) -> None:
    """The newest checkpoint says it, or the recovery where the life has committed none yet."""
    journal.record(plan_row())
    if recovery is not None:
        journal.record(recovery_row(life=recovery[0], origin=recovery[1]))
    if checkpoint is not None:
        life, origin = checkpoint
        journal.record(CheckpointRow(life=life, iteration=50, status="committed", origin=origin))
    flushed(journal)
    assert client.get("/plan").json()["descends_from_predicted"] is descends


def damaged(path: Path, content: str) -> None:
    journal = Journal.open(path)
    journal.record(plan_row())
    journal.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE events SET content = ?", (content,))
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _: None, "there is no journal"),
        (lambda path: path.write_bytes(b"x" * 5000), "not a CPSR journal"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: damaged(path, '{"life": 0}'), "damaged row"),
    ],
    ids=["absent", "foreign", "empty", "incomplete"],
)
def test_unreadable_journal_is_503(tmp_path: Path, client: TestClient, spoil: Any, words: str) -> None:
    spoil(tmp_path / "journal.db")
    body = error_of(client.get("/plan"), 503)
    assert body["code"] == "journal_unavailable"
    assert words in body["message"]
    if "row" in words:
        return  # a plan that cannot be read does not make the run unwell
    health = client.get("/healthz")
    assert (health.status_code, health.json()["status"]) == (503, "degraded")
    assert health.json()["reason"]


def test_the_answer_is_the_planners_own(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row(measured_plan()))
    explanation = {"rule": "as planned before the restart, until the next plan", "prices": None}
    journal.record(plan_row(measured_plan(), explanation=explanation))
    journal.record(CheckpointRow(life=0, iteration=50, status="committed", bytes=1000))
    flushed(journal)
    same = client.post("/plan/preview", json={"mtbf_hours": 12.0}).json()
    assert same["interval_iterations"] == measured_plan().interval_iterations
    frail = client.post("/plan/preview", json={"mtbf_hours": 0.5}).json()
    expected = make_plan(measured_inputs(mtbf_seconds=1800.0), LIMITS, recovery_mode="predict")
    assert frail["interval_iterations"] == expected.interval_iterations
    assert frail["explanation"]["expected"] == expected.explanation["expected"]
    assert frail["interval_seconds"] == 1.5 * expected.interval_iterations
    assert client.get("/plan").json()["interval_iterations"] == same["interval_iterations"]


def test_what_was_never_measured_cannot_be_previewed(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row(fixed_plan(50)))
    flushed(journal)
    assert error_of(client.post("/plan/preview", json={"mtbf_hours": 3}), 409)["code"] == "nothing_measured"


def test_an_override_is_written_shown_and_withdrawn(tmp_path: Path, writing: TestClient, journal: Journal) -> None:
    journal.record(plan_row())
    flushed(journal)
    asked = {"interval_iterations": 25, "reason": "repairs", "expires_in_seconds": 600}
    reply = writing.put("/plan/override", json=asked)
    assert reply.status_code == 200, reply.text
    written = latest_override(tmp_path)
    assert written is not None
    assert written.interval_iterations == 25
    assert 590 < written.expires_unix_seconds - time.time() <= 600
    shown = writing.get("/plan").json()["override"]
    assert shown == reply.json()
    assert shown["taken_up"] is False
    journal.record(plan_row(origin="override", explanation={"override": {"id": shown["id"]}}))
    flushed(journal)
    assert writing.get("/plan").json()["override"]["taken_up"] is True
    assert writing.delete("/plan/override").json()["id"] == shown["id"]
    assert writing.get("/plan").json()["override"] is None
    assert error_of(writing.delete("/plan/override"), 404)["code"] == "no_override"


def test_only_who_may_write_can_override_or_report(
    tmp_path: Path, client: TestClient, writing: TestClient, journal: Journal
) -> None:
    asked, report = {"interval_iterations": 25, "reason": "x"}, {"description": "x"}
    assert error_of(client.put("/plan/override", json=asked), 403)["code"] == "writes_off"
    assert error_of(client.delete("/plan/override"), 403)["code"] == "writes_off"
    assert error_of(client.post("/failures", json=report), 403)["code"] == "writes_off"
    # What a page of another site can send without being asked first has no JSON type.
    error_of(writing.post("/failures", content='{"description": "x"}', headers={"content-type": "text/plain"}), 422)
    assert latest_override(tmp_path) is None
    assert writing.get("/failures").json()["total"] == 0


def test_overrides_that_cannot_be_read_do_not_hide_the_plan(
    tmp_path: Path, writing: TestClient, journal: Journal
) -> None:
    journal.record(plan_row())
    flushed(journal)
    (tmp_path / "commands.db").write_bytes(b"x" * 4096)
    body = writing.get("/plan").json()
    assert body["override"] is None
    assert "overrides of the plan cannot be read" in body["warnings"][-1]
    error_of(writing.put("/plan/override", json={"interval_iterations": 25, "reason": "x"}), 503)
