"""The arithmetic of the overhead, and that tiny runs leave everything behind."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.overhead.blocks import Pair, summarise
from cpsr.benchmarks.overhead.run import AIM, Size, main


def test_the_overhead_is_relative_its_spread_is_by_run_and_a_machine_that_slows_down_shows_none() -> None:
    one_percent, three_percent = [Pair(1.01, 1.0)] * 4, [Pair(2.06, 2.0)] * 4
    result = summarise("job", [one_percent, three_percent], AIM)
    assert result.run_medians == pytest.approx([0.01, 0.03])
    assert result.overhead.value == pytest.approx(0.02)
    assert result.step_seconds == pytest.approx(0.3)  # blocks of five steps
    assert not result.met
    assert summarise("job", [[Pair(1.004, 1.0)] * 2], AIM).met
    # with, without | without, with: blocks of 1.0, 1.1, 1.2 and 1.3 s
    assert summarise("job", [[Pair(1.0, 1.1), Pair(1.3, 1.2)]], AIM).overhead.value == pytest.approx(0.0)


@pytest.mark.slow
def test_a_tiny_run_leaves_figures_and_cleans_up(tmp_path: Path) -> None:
    path, workdir = tmp_path / "overhead.json", tmp_path / "work"
    main(path, Size(runs=1, pairs=2), workdir)
    report = json.loads(path.read_text())
    assert [result["variant"] for result in report["results"]] == ["torch, one process", "DeepSpeed ZeRO-1, 2 ranks"]
    for result in report["results"]:
        assert result["step_seconds"] > 0
        assert [len(run) for run in result["overheads"]] == [1]
    assert not list(workdir.iterdir())
