"""The dashboard's queries, compared with what the real service exposes for a run in which everything has happened."""

import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cpsr.journal import CheckpointRow, FailureRow, Journal, ReportedFailure, report_failure
from cpsr.service.access import TOKEN_VARIABLE
from tests.launch.jobs import BIN
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
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']}-{target['refId']}")
    for panel in DASHBOARD["panels"]
    if panel["type"] != "row"
    for target in panel["targets"]
]
RESTARTS = DASHBOARD["annotations"]["list"][0]
START_SECONDS = 60.0


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
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, str]]]]:
    """By name of a metric, the labels of its samples, as a scrape with the token gets them."""
    run_dir = tmp_path_factory.mktemp("runs") / "example"
    journal = Journal.open(run_dir / "journal.db")
    record_everything(journal, run_dir)
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    token = secrets.token_urlsafe(32)
    command = [str(BIN / "cpsr"), "serve", "--run-dir", str(run_dir), "--host", "0.0.0.0", "--port", str(port)]
    with subprocess.Popen(command, env={**os.environ, TOKEN_VARIABLE: token}) as service:
        try:
            yield scraped(f"http://127.0.0.1:{port}", token)
        finally:
            service.terminate()
    journal.close()


def scraped(url: str, token: str) -> dict[str, list[dict[str, str]]]:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {token}"}).text
            break
        except httpx.HTTPError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
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


def labels_of(expression: Any, exposed: dict[str, list[dict[str, str]]]) -> set[str]:
    """Labels that the result has, for its legend."""
    if isinstance(expression, promql.AggregateExpr):
        assert "by" in str(expression.modifier)
        return set(expression.modifier.labels)
    if isinstance(expression, promql.VectorSelector):
        return set(exposed[expression.name][0])
    inner = [getattr(expression, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    found = [labels_of(part, exposed) for part in [*inner, *getattr(expression, "args", [])] if part is not None]
    return set.union(set(), *found)


def matching(selector: Any, exposed: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    """The labels of the samples that a selector takes; only the operators of the dashboard are known."""
    left = exposed.get(selector.name, [])
    for matcher in selector.matchers.matchers:
        assert str(matcher.op).rpartition(".")[2] in ("Equal", "Re")
        left = [
            labels for labels in left if matcher.name in labels and re.fullmatch(matcher.value, labels[matcher.name])
        ]
    return left


@pytest.mark.parametrize(("expression", "legend"), [*QUERIES, (RESTARTS["expr"], RESTARTS["titleFormat"])])
def test_each_query_finds_what_the_service_exposes(
    expression: str, legend: str, exposed: dict[str, list[dict[str, str]]]
) -> None:
    tree = parsed(expression)
    found = selectors(tree)
    assert found
    for selector in found:
        assert matching(selector, exposed), f"the service exposes nothing like {selector.prettify()}"
        assert "run" in {matcher.name for matcher in selector.matchers.matchers}  # the page's own choice of runs
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels_of(tree, exposed)


def test_every_metric_is_shown(exposed: dict[str, list[dict[str, str]]]) -> None:
    shown = {one.name for target in QUERIES for one in selectors(parsed(str(target.values[0])))}
    assert set(exposed) == shown
