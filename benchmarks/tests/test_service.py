"""The journal of the service's benchmark, its clients, and that a short run leaves everything behind."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from cpsr.benchmarks.service import run
from cpsr.benchmarks.service.long_journal import fill, thin_out
from cpsr.benchmarks.service.run import poll
from cpsr.journal import JournalReader

STEPS, CHECKPOINTS = 30_000, 300
PERIOD = 0.2  # seconds


def test_the_journal_is_a_job_s(tmp_path: Path) -> None:
    fill(tmp_path / "run", STEPS, CHECKPOINTS, lambda rows: None)
    own = tmp_path / "run" / "journal.db"
    with JournalReader(own) as reader:
        assert [step.iteration for step in reader.losses()] == list(range(1, STEPS + 1))
        checkpoints, plan = reader.checkpoints(), reader.latest_plan()
    assert [checkpoint.iteration for checkpoint in checkpoints] == list(range(100, STEPS + 1, 100))
    assert plan is not None
    assert plan.from_iteration == STEPS
    left = thin_out(own, 1_000)
    with JournalReader(own) as reader:
        assert len(reader.losses()) == left < 10_000


def test_clients_do_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that stands still is asked all the same, and the wait of every request is counted."""
    asked, all_asked = 0, asyncio.Event()

    async def slow(self: httpx.AsyncClient, url: str) -> httpx.Response:
        nonlocal asked
        asked += 1
        first = asked == 1
        if asked == 8:
            all_asked.set()
        await asyncio.wait_for(all_asked.wait(), 60)
        return httpx.Response(503 if first else 200)

    monkeypatch.setattr(httpx.AsyncClient, "get", slow)
    monkeypatch.setattr(run, "PERIOD_SECONDS", PERIOD)
    answers, refused = poll("http://127.0.0.1:1", 4, 2 * PERIOD)
    assert (asked, len(answers), refused) == (8, 7, 1)
    assert max(answers) >= 1.5 * PERIOD  # the second is to be sent after a quarter, the last after seven


@pytest.mark.slow
def test_the_whole_benchmark_over_a_short_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WARM_UP_SECONDS", 1.0)
    path = tmp_path / "service.json"
    run.main(path, STEPS, CHECKPOINTS, clients=3, seconds=2.0, workdir=tmp_path / "work")
    one = json.loads(path.read_text())["result"]
    assert (one["requests"], one["refused"]) == (6, 0)
    assert one["trained_iterations"] > 0
    assert 10e6 < one["service_bytes"] < 1e9
    assert 0 < one["p50_seconds"] <= one["p99_seconds"] <= one["longest_seconds"]
    assert list((tmp_path / "work").iterdir()) == []
