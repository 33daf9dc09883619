"""What every tiny run of ranks leaves; those that start other programs beside are slow."""

import json
from pathlib import Path
from typing import Any

import pytest

from cpsr.benchmarks.cadence import run as cadence
from cpsr.benchmarks.durable import run as durable
from cpsr.benchmarks.overhead import run as overhead
from cpsr.benchmarks.overhead.blocks import Pair, summarise
from cpsr.benchmarks.reshard import run as reshard


def left(path: Path, workdir: Path) -> Any:
    """The figures of a run, which has left nothing else."""
    assert not list(workdir.iterdir())
    return json.loads(path.read_text())


def test_overhead_is_relative_its_spread_is_by_run_and_a_machine_that_slows_down_shows_none() -> None:
    one_percent, three_percent = [Pair(1.01, 1.0)] * 4, [Pair(2.06, 2.0)] * 4
    result = summarise("job", [one_percent, three_percent], overhead.AIM)
    assert result.run_medians == pytest.approx([0.01, 0.03])
    assert result.overhead.value == pytest.approx(0.02)
    assert result.step_seconds == pytest.approx(0.3)  # blocks of five steps
    assert not result.met
    assert summarise("job", [[Pair(1.004, 1.0)] * 2], overhead.AIM).met
    # with, without | without, with: blocks of 1.0, 1.1, 1.2 and 1.3 s
    assert summarise("job", [[Pair(1.0, 1.1), Pair(1.3, 1.2)]], overhead.AIM).overhead.value == pytest.approx(0.0)


def test_a_snapshot_that_few_blocks_contain_counts_as_often_as_it_is_planned() -> None:
    """Steps of 0.2 s that cost 1%, and snapshots of 0.1 s every 25 steps, which are 2%."""
    without, containing = [Pair(1.01, 1.0, 0, 25)] * 2, [Pair(1.01, 1.0, 0, 25), Pair(1.11, 1.0, 1, 25)]
    result = summarise("job", [[*without * 8, *containing * 2]], overhead.AIM)
    assert result.steps_overhead.value == pytest.approx(0.01)
    assert result.snapshot_seconds is not None
    assert result.snapshot_seconds.value == pytest.approx(0.1)
    assert result.overhead.value == pytest.approx(0.03)


ALONE = "torch, one process"


@pytest.mark.parametrize("jobs", [{ALONE: 1}, pytest.param(overhead.JOBS, marks=pytest.mark.slow)], ids=len)
def test_overhead(jobs: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "JOBS", jobs)
    path, workdir = tmp_path / "overhead.json", tmp_path / "work"
    overhead.main(path, overhead.Size(runs=1, pairs=2), workdir)
    report = left(path, workdir)
    assert [result["variant"] for result in report["results"]] == list(jobs)
    for result in report["results"]:
        assert result["step_seconds"] > 0
        assert [len(run) for run in result["overheads"]] == [1]


def test_durable(tmp_path: Path) -> None:
    path, workdir = tmp_path / "durable.json", tmp_path / "work"
    durable.main(path, rounds=2, workdir=workdir, megabytes=[2])
    (size,) = left(path, workdir)["sizes"]
    assert {name: len(own) for name, own in size["samples"].items()} == {durable.CPSR: 2, durable.RAW: 2}
    assert size["ratio"]["value"] > 0


@pytest.mark.slow
def test_reshard(tmp_path: Path) -> None:
    path, workdir = tmp_path / "reshard.json", tmp_path / "work"
    reshard.main(path, rounds=2, workdir=workdir, width=16, layers=2)
    cases = left(path, workdir)["cases"]
    assert [(row["saved_by"], row["ranks"]) for row in cases] == [(2, 3), (4, 2), (1, 4)]
    assert all(row["read_over_held"]["value"] > 0 for row in cases)


@pytest.mark.slow
def test_cadence_and_its_kills_lose_no_more_than_the_interval(tmp_path: Path) -> None:
    path, workdir = tmp_path / "cadence.json", tmp_path / "work"
    cadence.main(path, cadence.Size(runs=1, rounds=2, kills=1), workdir=workdir)
    figures = left(path, workdir)
    assert len(figures["jobs"]) == 2 * len(cadence.INTERVALS)
    assert all(job["stall_seconds"][0] > 0 for job in figures["jobs"])
    assert all(job["copies_seconds"]["low"] <= job["copies_seconds"]["high"] for job in figures["jobs"])
    assert figures["aims"]["lost at most the interval, exactly"]
    assert [kill["interval_iterations"] for kill in figures["kills"]] == [*cadence.INTERVALS, None]
    assert figures["kills"][-1]["restored_iteration"] % figures["checkpoint_iterations"] == 0
