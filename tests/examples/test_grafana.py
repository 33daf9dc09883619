"""The dashboard's queries, compared with what the real service exposes for a run in which everything has happened."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from cpsr.journal import CheckpointRow, FailureRow, Journal, ReportedFailure, report_failure
from cpsr.service.app import create_app
from tests.service.conftest import BASE_URL
from tests.service.journals import (
    flushed,
    plan_row,
    record_steps,
    recovery_row,
    two_tier_plan,
)

promql = pytest.importorskip("promql_parser", reason="pip install -e '.[dev]'")

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana" / "cpsr.json").read_text())
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']}-{target['refId']}")
    for panel in DASHBOARD["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
RESTARTS = DASHBOARD["annotations"]["list"][0]


def record_everything(journal: Journal, run_dir: Path) -> None:
    """Rows of all kinds that /metrics counts."""
    journal.start_life("predict", ranks=2)
    journal.record(plan_row(two_tier_plan()))
    record_steps(journal)
    for iteration in (2, 4):
        journal.record(CheckpointRow(life=0, iteration=iteration, status="committed", bytes=1000, stall_seconds=0.25))
    journal.record(FailureRow(life=0, iteration=6, checkpoint_iteration=4, description="x"))
    journal.record(recovery_row())
    flushed(journal)
    report_failure(run_dir, ReportedFailure(description="y", failed_unix_seconds=1.0))


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """By name of a metric, the labels of its samples."""
    run_dir = tmp_path_factory.mktemp("runs") / "example"
    journal = Journal.open(run_dir / "journal.db")
    record_everything(journal, run_dir)
    journal.close()
    text = TestClient(create_app(run_dir), base_url=BASE_URL).get("/metrics").text
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def parsed(expression: str) -> Any:
    """As Prometheus gets it: Grafana replaces its variables."""
    for variable, value in {"$__rate_interval": "2m", "$__interval": "30s", "$run": "example"}.items():
        expression = expression.replace(variable, value)
    return promql.parse(expression)


def nodes(expression: Any) -> Iterator[Any]:
    """An expression and all that is in it."""
    yield expression
    parts = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for part in [*parts, *getattr(expression, "args", [])]:
        if part is not None:
            yield from nodes(part)


def selectors(expression: Any) -> list[Any]:
    return [node for node in nodes(expression) if isinstance(node, promql.VectorSelector)]


def matching(selector: Any, exposed: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    """The labels of the samples that a selector takes; only the operators of the dashboard are known."""
    left = exposed.get(selector.name, [])
    for matcher in selector.matchers.matchers:
        assert str(matcher.op).rpartition(".")[2] in ("Equal", "Re")
        left = [
            labels for labels in left if matcher.name in labels and re.fullmatch(matcher.value, labels[matcher.name])
        ]
    return left


@pytest.mark.parametrize("expression", [*QUERIES, RESTARTS["expr"]])
def test_each_query_finds_what_the_service_exposes(expression: str, exposed: dict[str, list[dict[str, str]]]) -> None:
    found = selectors(parsed(expression))
    assert found
    for selector in found:
        assert matching(selector, exposed), f"the service exposes nothing like {selector.prettify()}"
        assert "run" in {matcher.name for matcher in selector.matchers.matchers}  # the page's own choice of runs


def test_every_metric_is_shown(exposed: dict[str, list[dict[str, str]]]) -> None:
    shown = {one.name for target in QUERIES for one in selectors(parsed(str(target.values[0])))}
    assert set(exposed) == shown
