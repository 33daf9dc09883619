"""The arithmetic of the overhead, and that a tiny run leaves everything behind."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.overhead.blocks import Pair
from cpsr.benchmarks.overhead.result import summarise
from cpsr.benchmarks.overhead.run import main


def test_a_machine_that_slows_down_steadily_shows_no_overhead() -> None:
    # with, without | without, with: blocks of 1.0, 1.1, 1.2 and 1.3 s
    result = summarise("job", [[Pair(attached_seconds=1.0, detached_seconds=1.1), Pair(1.3, 1.2)]])
    assert result.overhead.value == pytest.approx(0.0)


def test_the_overhead_is_relative_and_its_spread_is_by_run() -> None:
    one_percent, three_percent = [Pair(1.01, 1.0)] * 4, [Pair(2.06, 2.0)] * 4
    result = summarise("job", [one_percent, three_percent])
    assert result.run_medians == pytest.approx([0.01, 0.03])
    assert result.overhead.value == pytest.approx(0.02)
    assert result.step_seconds == pytest.approx(0.15)  # blocks of ten steps
    assert not result.met
    assert summarise("job", [[Pair(1.004, 1.0)] * 2]).met


def test_a_pair_without_its_opposite_order_is_refused() -> None:
    with pytest.raises(ValueError, match="opposite"):
        summarise("job", [[Pair(1.0, 1.0)] * 3])


def test_a_tiny_run_of_both_jobs_leaves_figures_samples_and_a_plot_and_cleans_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, workdir = tmp_path / "overhead.json", tmp_path / "work"
    main(path, pairs=1, workdir=workdir, runs=1)
    report = json.loads(path.read_text())
    assert report["pairs"] == 2  # rounded up: both orders
    assert [result["variant"] for result in report["results"]] == ["torch, one process", "DeepSpeed ZeRO-1, 2 ranks"]
    for result in report["results"]:
        assert result["step_seconds"] > 0
        assert [len(run) for run in result["overheads"]] == [1]
        assert [len(run) for run in report["samples"][result["variant"]]] == [2]
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not list(workdir.iterdir())
    assert "DeepSpeed" in capsys.readouterr().out  # further words may be on other lines
