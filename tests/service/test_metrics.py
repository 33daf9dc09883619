from pathlib import Path

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from cpsr.journal import CheckpointRow, FailureRow, Journal, ReportedFailure, report_failure
from tests.service.journals import (
    flushed,
    measured_plan,
    plan_row,
    record_steps,
    recovery_row,
)


def samples(client: TestClient) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_figures_of_a_run(tmp_path: Path, client: TestClient, journal: Journal) -> None:
    assert journal.start_life("predict", ranks=3) == 1
    journal.record(plan_row(measured_plan()))
    record_steps(journal)
    for iteration, status in ((50, "committed"), (100, "committed"), (150, "skipped")):
        journal.record(
            CheckpointRow(
                life=0,
                iteration=iteration,
                status=status,  # type: ignore[arg-type]  # one of them
                bytes=1000 if status == "committed" else None,
                stall_seconds=0.25,
                created_unix_seconds=iteration,
            )
        )
    journal.record(FailureRow(life=0, iteration=1, checkpoint_iteration=None, description="x"))
    journal.record(recovery_row())
    flushed(journal)
    report_failure(tmp_path, ReportedFailure(description="y", failed_unix_seconds=1.0))
    found, run = samples(client), tmp_path.name

    def value(name: str, **labels: str) -> float:
        return found[f"cpsr_{name}", frozenset({"run": run, **labels}.items())]

    assert (value("journal_up"), value("healthy"), value("iteration")) == (1, 1, 7)
    assert (value("training_loss"), value("iteration_seconds")) == (2.0, 1.5)
    assert (value("lives"), value("ranks")) == (2, 3)
    assert value("checkpoint_interval_iterations", origin="cpsr") == measured_plan().interval_iterations
    assert value("expected_cost_ratio") > 0
    assert value("checkpoints_total", status="committed") == 2
    assert value("checkpoint_bytes_total", status="committed") == 2000
    assert value("checkpoint_stall_seconds_total", status="skipped") == 0.25
    assert (value("checkpoint_iteration"), value("checkpoint_timestamp_seconds")) == (100, 100)
    assert (value("failures_total", reported="false"), value("failures_total", reported="true")) == (1, 1)
    assert value("recoveries_total", method="line", outcome="kept") == 1
    assert all(name.startswith("cpsr_") for name, _ in found)


def test_a_journal_that_cannot_be_read_is_a_figure(tmp_path: Path, client: TestClient) -> None:
    (tmp_path / "journal.db").write_bytes(b"x" * 5000)
    found = samples(client)
    label = frozenset({"run": tmp_path.name}.items())
    assert (found["cpsr_journal_up", label], found["cpsr_healthy", label]) == (0, 0)
