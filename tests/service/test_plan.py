import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cpsr.journal import CheckpointRow, Journal, PhaseRow, RecoveryRow, RecoverySource
from tests.journal.timeline import START, Timeline
from tests.service.journals import (
    error_of,
    flushed,
    measured_plan,
    plan_row,
    record_steps,
    recovery_row,
    two_tier_plan,
)


def test_plan_with_everything(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "gpt", "mode": "auto", "world_size": 2}')
    journal.record(plan_row())
    record_steps(journal)
    journal.record(CheckpointRow(life=0, iteration=50, status="committed", bytes=1234))
    journal.record(CheckpointRow(life=0, iteration=100, status="skipped", reason="slow disk"))
    journal.record(recovery_row())
    flushed(journal)
    body = client.get("/plan").json()
    assert body["recovery_mode"] == "recompute"
    assert (body["run_id"], body["world_size"], body["mode"], body["last_iteration"]) == ("gpt", 2, "predict", 7)
    assert (body["iteration_seconds"], body["bound"], body["override"], body["warnings"]) == (1.5, "none", None, [])
    assert [entry["rank"] for entry in body["ranks"]] == [0, 1]
    assert body["ranks"][1] == {
        "rank": 1,
        "interval_iterations": 139,
        "interval_seconds": 139 * 1.5,
        "origin": "young",
        "from_iteration": 20,
    }
    assert body["explanation"]["inputs"]["stall_seconds"] == 0.5
    assert {one["name"] for one in body["rivals"]} >= {"young", "daly", "checkfreq", "pccheck", "gemini"}
    assert (body["newest_checkpoint"]["iteration"], body["newest_checkpoint"]["bytes"]) == (50, 1234)
    assert (body["last_recovery"]["method"], body["last_recovery"]["guard"]) == ("line", {"probe_loss_nats": "nan"})
    assert body["last_recovery"]["sources"] == [{"rank": 1, "source": "disk", "iteration": 50}]
    assert body["descends_from_predicted"] is True
    assert 0 <= body["age_seconds"] < 60


def test_numbers_of_ranks_in_turn(tmp_path: Path, client: TestClient) -> None:
    with Timeline(tmp_path / "journal.db") as timeline:
        timeline.record(0, [plan_row()])
        for life, (ranks, at) in enumerate([(4, 0), (3, 80), (3, 90)]):
            timeline.begin(life, life, ranks)
            timeline.restore(life, at)
    assert client.get("/plan").json()["sizes"] == [
        {"ranks": 4, "since_iteration": 0, "life": 0, "since_unix_seconds": START},
        {"ranks": 3, "since_iteration": 80, "life": 1, "since_unix_seconds": START + 1},
    ]


def test_inputs_have_their_unit_their_source_and_their_age_now(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row(measured_plan(), from_iteration=3))
    record_steps(journal)  # the plan is four iterations old
    flushed(journal)
    inputs = {one["name"]: one for one in client.get("/plan").json()["inputs"]}
    assert inputs["stall_seconds"] == {
        "name": "stall_seconds",
        "value": 0.5,
        "unit": "s",
        "source": "measured",
        "samples": 8,
        "age_iterations": 5 + 4,
    }
    assert (inputs["failures_per_second"]["unit"], inputs["failures_per_second"]["age_iterations"]) == ("1/s", None)
    assert (inputs["persist_iterations"]["unit"], inputs["mtbf_hours"]["unit"]) == ("iterations", "h")


def test_both_tiers_and_what_failures_leave(client: TestClient, journal: Journal) -> None:
    plan = two_tier_plan()
    journal.record(plan_row(from_iteration=0))
    journal.record(plan_row(plan, from_iteration=3))
    flushed(journal)
    body = client.get("/plan").json()
    assert body["memory_interval_iterations"] == plan.memory_interval_iterations
    process, machine, everything = body["classes"]
    assert (process["scope"], process["back_to"], process["seen"], process["prior_share"]) == (
        "process",
        "memory",
        1,
        0.3,
    )
    assert (machine["back_to"], everything["back_to"]) == ("replica", "disk")
    assert [way["way"] for way in process["ways"]] == ["memory", "disk"]
    assert process["ways"] == plan.explanation["classes"]["process"]["ways"]
    assert process["loss_iterations"] < machine["loss_iterations"] < everything["loss_iterations"]
    newest, first = client.get("/plan/history").json()["plans"]
    assert newest["memory_interval_iterations"] == plan.memory_interval_iterations
    assert first["memory_interval_iterations"] is None
    preview = client.post("/plan/preview", json={"mtbf_hours": 0.1}).json()
    assert preview["memory_interval_iterations"] < plan.memory_interval_iterations


def test_what_was_never_measured_is_a_prior(client: TestClient, journal: Journal) -> None:
    """Also where an older version wrote it as measured."""
    plan = measured_plan()
    origins = {"failures_per_second": {"kind": "measured", "samples": 0, "age_iterations": 3}}
    journal.record(plan_row(plan, explanation={**plan.explanation, "origins": origins}))
    flushed(journal)
    inputs = {one["name"]: one for one in client.get("/plan").json()["inputs"]}
    rate = inputs["failures_per_second"]
    assert (rate["source"], rate["samples"], rate["age_iterations"]) == ("prior", 0, None)


def test_the_phase_is_the_one_after_those_that_ended(client: TestClient, journal: Journal) -> None:
    journal.record(plan_row())
    flushed(journal)
    assert client.get("/plan").json()["phase"] == {"phase": 0, "first_iteration": 0}
    journal.record(
        PhaseRow(life=0, phase=0, first_iteration=0, last_iteration=120, xi=1.0, last_xi=2.0, ended_by="change")
    )
    flushed(journal)
    assert client.get("/plan").json()["phase"] == {"phase": 1, "first_iteration": 120}


def test_history_shows_until_when_each_plan_applied(client: TestClient, journal: Journal) -> None:
    journal.record(
        PhaseRow(life=0, phase=0, first_iteration=0, last_iteration=40, xi=1.0, last_xi=2.0, ended_by="change")
    )
    for place, start in enumerate((0, 40, 90)):
        journal.record(plan_row(from_iteration=start, created_unix_seconds=100.0 + place))
    flushed(journal)
    body = client.get("/plan/history").json()
    assert [(one["from_iteration"], one["until_iteration"]) for one in body["plans"]] == [(90, None), (40, 90), (0, 40)]
    assert [one["phase"] for one in body["plans"]] == [1, 1, 0]
    assert body["plans"][0]["rival_interval_iterations"]["young"] == 139
    assert body["plans"][0]["cost_per_second"] > 0
    earlier = client.get("/plan/history", params={"until_unix_seconds": 102.0, "limit": 1}).json()
    assert [(one["from_iteration"], one["until_iteration"]) for one in earlier["plans"]] == [(40, 90)]
    assert earlier["total"] == 2


@pytest.mark.parametrize(
    ("last", "origin", "descends"),
    [
        ({"outcome": "kept"}, "trained", True),
        ({"outcome": "watching"}, "trained", True),
        ({"outcome": "vetoed", "restored_iteration": 50}, "trained", False),
        ({"outcome": "vetoed", "restored_iteration": 50}, "predicted", True),
        ({"outcome": "rolled_back"}, "trained", False),
        ({"outcome": "rolled_back", "guard": {"rolled_back_to": "exact"}}, "trained", False),
        ({"outcome": "rolled_back", "guard": {"rolled_back_to": "stale"}}, "trained", True),
        ({"outcome": "rolled_back", "checkpoint_iteration": 40}, "predicted", None),
        ({"method": "exact", "restored_iteration": 50}, "trained", False),
        ({"method": "exact", "restored_iteration": 50}, "predicted", True),
        ({"method": "exact", "restored_iteration": 40}, "predicted", None),
        ({"method": "scratch", "restored_iteration": 0, "checkpoint_iteration": None}, "predicted", False),
        ({"method": "stale", "restored_iteration": 50}, "trained", True),
        ({"method": "stale", "restored_iteration": 50, "outcome": "vetoed"}, "trained", True),
        ({"method": "of a later version"}, "trained", True),
        (None, "predicted", False),
    ],
)
def test_descent_from_a_predicted_state(
    client: TestClient, journal: Journal, last: dict[str, Any] | None, origin: Any, descends: bool | None
) -> None:
    journal.record(plan_row())
    journal.record(CheckpointRow(life=0, iteration=50, status="committed", origin=origin))
    if last is not None:
        journal.record(recovery_row(id="earlier", method="exact", restored_iteration=10))
        journal.record(recovery_row(**{"life": 1, **last}))
    flushed(journal)
    assert client.get("/plan").json()["descends_from_predicted"] is descends


IN_MEMORY = (RecoverySource(rank=0, source="memory", iteration=92),)
DUMPED = (RecoverySource(rank=0, source="departure", iteration=92),)
PREDICTED_BEFORE = recovery_row(id="earlier", life=1, restored_iteration=60)
EXACT_BEFORE = recovery_row(id="earlier", life=1, restored_iteration=50, method="exact")
ROLLED_BACK_BEFORE = recovery_row(id="earlier", life=1, restored_iteration=60, outcome="rolled_back")


@pytest.mark.parametrize(
    ("earlier", "checkpoints", "last", "descends"),
    [
        (None, [], {"method": "departure", "sources": DUMPED}, False),
        (EXACT_BEFORE, [], {"method": "departure", "sources": DUMPED}, False),
        (PREDICTED_BEFORE, [], {"method": "departure", "sources": DUMPED}, True),
        (ROLLED_BACK_BEFORE, [], {"method": "departure", "sources": DUMPED}, False),
        (PREDICTED_BEFORE, [(1, 70, "predicted")], {"method": "departure", "sources": DUMPED}, True),
        (EXACT_BEFORE, [(1, 70, "predicted")], {"method": "departure", "sources": DUMPED}, True),
        (PREDICTED_BEFORE, [], {"method": "exact", "sources": IN_MEMORY}, True),
        (EXACT_BEFORE, [], {"method": "exact", "sources": IN_MEMORY}, False),
        (PREDICTED_BEFORE, [], {"method": "exact", "restored_iteration": 50}, False),
        # What has been committed since says it itself.
        (None, [(2, 100, "predicted")], {"method": "departure", "sources": DUMPED}, True),
        (PREDICTED_BEFORE, [(2, 100, "trained")], {"method": "departure", "sources": DUMPED}, False),
    ],
)
def test_what_was_left_in_memory_descends_from_what_the_life_before_had(
    client: TestClient,
    journal: Journal,
    earlier: RecoveryRow | None,
    checkpoints: list[tuple[int, int, Any]],
    last: dict[str, Any],
    descends: bool,
) -> None:
    journal.record(plan_row())
    for life, iteration, origin in [(0, 50, "trained"), *checkpoints]:
        journal.record(CheckpointRow(life=life, iteration=iteration, status="committed", origin=origin))
    if earlier is not None:
        journal.record(earlier)
    journal.record(recovery_row(**{"life": 2, **last}))
    flushed(journal)
    assert client.get("/plan").json()["descends_from_predicted"] is descends


@pytest.mark.parametrize("first", [PREDICTED_BEFORE, EXACT_BEFORE])
def test_a_state_that_several_lives_found_in_memory_descends_from_the_first(
    client: TestClient, journal: Journal, first: RecoveryRow
) -> None:
    journal.record(plan_row())
    journal.record(first)
    for life in (2, 3, 4):
        journal.record(recovery_row(life=life, method="departure", sources=DUMPED))
    flushed(journal)
    assert client.get("/plan").json()["descends_from_predicted"] is (first is PREDICTED_BEFORE)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "absent"),
        ("{", "cannot be read"),
        ("[]", "no object"),
        ('{"run_id": "x", "mode": "auto", "world_size": "2"}', "'world_size'"),
        ('{"run_id": "x", "mode": "auto", "world_size": -2}', "'world_size'"),
        ('{"run_id": "x", "mode": "auto", "world_size": 1000000000000}', "'world_size'"),
    ],
)
def test_plan_without_a_usable_run_json(
    tmp_path: Path, client: TestClient, journal: Journal, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    journal.record(plan_row())
    flushed(journal)
    response = client.get("/plan")
    body = response.json()
    assert (response.status_code, body["world_size"], len(body["ranks"])) == (200, None, 1)
    assert body["ranks"][0]["interval_seconds"] is None
    assert words in body["warnings"][0]


def test_no_plan_yet(client: TestClient, journal: Journal) -> None:
    assert error_of(client.get("/plan"), 404)["code"] == "no_plan_yet"


def newer(path: Path) -> None:
    Journal.open(path).close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version=99")
    connection.close()


def truncated(path: Path) -> None:
    journal = Journal.open(path)
    journal.record(plan_row())
    record_steps(journal)
    journal.close()
    os.truncate(path, 6000)


def damaged(path: Path, assignment: str) -> None:
    journal = Journal.open(path)
    journal.record(plan_row())
    journal.close()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute(f"UPDATE plans SET {assignment}")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _: None, "there is no journal"),
        (newer, "schema 99"),
        (truncated, "truncated"),
        (lambda path: path.write_bytes(b"x" * 5000), "not a CPSR journal"),
        (lambda path: path.touch(), "is empty"),
        (lambda path: path.mkdir(), "there is no journal"),
        (lambda path: damaged(path, "explanation = '{torn'"), "damaged PlanRow"),
        (lambda path: damaged(path, "explanation = '3'"), "damaged PlanRow"),
        (lambda path: damaged(path, "from_iteration = 'x'"), "damaged PlanRow"),
        (lambda path: damaged(path, "mode = 'guess'"), "does not know"),
    ],
    ids=["absent", "newer", "truncated", "foreign", "empty", "directory", "torn", "number", "text", "unknown"],
)
def test_unreadable_journal_is_503(tmp_path: Path, client: TestClient, spoil: Any, words: str) -> None:
    spoil(tmp_path / "journal.db")
    body = error_of(client.get("/plan"), 503)
    assert body["code"] == "journal_unavailable"
    assert words in body["message"]
    if "Plan" in words or "know" in words:
        return  # a plan that cannot be read does not make the run unwell
    health = client.get("/healthz")
    assert (health.status_code, health.json()["status"]) == (503, "degraded")
    assert health.json()["reason"]
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)


def test_locked_journal_is_503_and_comes_back(tmp_path: Path, client: TestClient) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.record(plan_row())
    journal.close()
    connection = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.execute("BEGIN EXCLUSIVE")
    assert "locked" in error_of(client.get("/plan"), 503)["message"]
    assert client.get("/healthz").status_code == 503
    connection.execute("ROLLBACK")
    connection.close()
    assert client.get("/plan").status_code == 200


def test_a_number_that_is_none_is_null_or_given_by_its_name(client: TestClient, journal: Journal) -> None:
    nan = replace(measured_plan(), explanation={"inputs": {"stall_seconds": float("nan")}, "bound": "none"})
    journal.record(plan_row(nan))
    record_steps(journal, seconds=float("nan"))
    flushed(journal)
    body = client.get("/plan").json()
    assert (body["iteration_seconds"], body["inputs"][0]["value"]) == (None, "nan")
