import asyncio
import json
import time
from pathlib import Path

import httpx
import pytest

from cpsr.benchmarks.service import processes, run
from cpsr.benchmarks.service.clients import PERIOD_SECONDS, Answers, poll
from cpsr.benchmarks.service.long_journal import copied, journal_of, thin_out
from cpsr.benchmarks.service.result import AIM_BYTES, AIM_SECONDS, Result, summarise
from cpsr.journal import JournalReader

STEPS, CHECKPOINTS = 30_000, 300


def result(seconds: list[float], refused: int = 0, service_bytes: int = 1) -> Result:
    return summarise(
        "x",
        Answers(seconds, [0.0] * len(seconds), refused, 10),
        step_rows=1,
        journal_bytes=1,
        processor_seconds=0.1,
        service_bytes=service_bytes,
        trained_iterations=1,
    )


def test_the_journal_is_a_job_s_and_built_once(tmp_path: Path) -> None:
    counts: list[int] = []
    path = journal_of(tmp_path / "cache", STEPS, CHECKPOINTS, counts.append)
    assert counts[-1] == STEPS
    built = path.stat().st_mtime_ns
    assert journal_of(tmp_path / "cache", STEPS, CHECKPOINTS, counts.append) == path
    assert path.stat().st_mtime_ns == built
    own = copied(path, tmp_path / "run")
    with JournalReader(own) as reader:
        assert [step.iteration for step in reader.losses()] == list(range(1, STEPS + 1))
        checkpoints, plan = reader.checkpoints(), reader.latest_plan()
    assert [checkpoint.iteration for checkpoint in checkpoints] == list(range(100, STEPS + 1, 100))
    assert plan is not None
    assert plan.from_iteration == STEPS
    assert set(plan.explanation) > {"rule", "inputs", "rivals"}
    left = thin_out(own, 1_000, lambda: None)
    with JournalReader(own) as reader:
        assert len(reader.losses()) == left < 10_000
    assert {entry.name for entry in (tmp_path / "cache").iterdir()} == {path.name}


@pytest.mark.parametrize(
    ("one", "met"),
    [
        (result([0.5 * AIM_SECONDS] * 200), [True, True]),
        (result([0.5 * AIM_SECONDS] * 97 + [2 * AIM_SECONDS] * 3), [False, True]),
        (result([0.5 * AIM_SECONDS] * 200, refused=1), [False, True]),
        (result([0.5 * AIM_SECONDS], service_bytes=int(AIM_BYTES) + 1), [True, False]),
    ],
)
def test_aims(one: Result, met: list[bool]) -> None:
    assert list(one.aims().values()) == met


def test_clients_do_not_wait_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that stands still for long is asked all the same, and the wait of every request is counted."""
    started: list[float] = []

    async def slow(self: httpx.AsyncClient, url: str) -> httpx.Response:

        started.append(time.perf_counter())
        await asyncio.sleep(1.5 * PERIOD_SECONDS)
        return httpx.Response(200, content=b"12345")

    monkeypatch.setattr(httpx.AsyncClient, "get", slow)
    answers = poll("http://127.0.0.1:1", 4, 2 * PERIOD_SECONDS)
    assert len(started) == len(answers.seconds) == 8
    assert max(started) - min(started) < 2 * PERIOD_SECONDS + 1.0
    assert min(answers.seconds) >= 1.5 * PERIOD_SECONDS
    assert answers.bytes == 5


@pytest.mark.slow
def test_the_whole_benchmark_over_a_short_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "WARM_UP_SECONDS", 1.0)
    path = tmp_path / "service.json"
    run.main(path, STEPS, CHECKPOINTS, clients=3, seconds=2.0, workdir=tmp_path / "work", cache=tmp_path / "cache")
    report = json.loads(path.read_text())
    assert [one["name"] for one in report["results"]] == ["old steps thinned out"]
    for one in report["results"]:
        assert one["requests"] == 6
        assert one["refused"] == 0
        assert one["trained_iterations"] > 0
        assert 10e6 < one["service_bytes"] < 1e9
        assert 0 < one["p50_seconds"] <= one["p99_seconds"] <= one["longest_seconds"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "p99" in capsys.readouterr().out
    assert list((tmp_path / "work").iterdir()) == []
