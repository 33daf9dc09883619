"""The arithmetic of the overhead, and that tiny runs leave everything behind."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cpsr.benchmarks.overhead import run
from cpsr.benchmarks.overhead.blocks import Pair
from cpsr.benchmarks.overhead.parts import DEFAULT, PARTS, obstacles
from cpsr.benchmarks.overhead.result import summarise
from cpsr.benchmarks.overhead.run import main
from cpsr.demo.model import GPTConfig
from cpsr.errors import ConfigError

TINY = replace(
    DEFAULT,
    runs=1,
    pairs=2,
    warm_up=2,
    intervals=2,
    interval_pairs=2,
    timeline_iterations=40,
    timeline_model=GPTConfig(layers=1, heads=2, width=32),
)
PNG = b"\x89PNG"


def test_a_machine_that_slows_down_steadily_shows_no_overhead() -> None:
    # with, without | without, with: blocks of 1.0, 1.1, 1.2 and 1.3 s
    result = summarise("job", [[Pair(attached_seconds=1.0, detached_seconds=1.1), Pair(1.3, 1.2)]])
    assert result.overhead.value == pytest.approx(0.0)


def test_the_overhead_is_relative_and_its_spread_is_by_run() -> None:
    one_percent, three_percent = [Pair(1.01, 1.0)] * 4, [Pair(2.06, 2.0)] * 4
    result = summarise("job", [one_percent, three_percent])
    assert result.run_medians == pytest.approx([0.01, 0.03])
    assert result.overhead.value == pytest.approx(0.02)
    assert result.step_seconds == pytest.approx(0.3)  # blocks of five steps
    assert not result.met
    assert summarise("job", [[Pair(1.004, 1.0)] * 2]).met
    assert not summarise("job", [[Pair(1.004, 1.0)] * 4 + [Pair(1.03, 1.0)] * 2]).met  # its interval reaches the aim


def test_each_variant_has_its_own_blocks_and_aim() -> None:
    result = summarise("job", [[Pair(1.02, 1.0)] * 2], block_steps=20, aim=0.03)
    assert result.step_seconds == pytest.approx(0.05)
    assert result.to_json()["aims"] == {"job: below 3% of a step": True}


def test_a_pair_without_its_opposite_order_is_refused() -> None:
    with pytest.raises(ValueError, match="opposite"):
        summarise("job", [[Pair(1.0, 1.0)] * 3])


@pytest.mark.parametrize("parts", [["wrapper", "stall"], []])
def test_parts_that_are_not_known_are_refused(parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--parts .* there are wrapper, bubbles, memory"):
        main(parts=parts)


def test_a_pipeline_is_left_out_where_its_stages_would_share_a_gpu() -> None:
    assert list(obstacles(PARTS, "cuda", 1)) == ["bubbles"]
    assert obstacles(PARTS, "cuda", 2) == obstacles(PARTS, "cpu", 0) == obstacles(["memory"], "cuda", 1) == {}


def test_where_nothing_is_left_the_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "describe_device", lambda device: {"kind": device, "count": 1})
    with pytest.raises(ConfigError, match=r"2 stages needs as many GPUs, and there are 1.* --device cpu"):
        main(parts=["bubbles"], device="cuda")


@pytest.mark.slow
def test_a_tiny_run_of_the_wrapper_leaves_figures_samples_and_a_plot_and_cleans_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, workdir = tmp_path / "overhead.json", tmp_path / "work"
    main(path, TINY, ["wrapper"], workdir)
    report = json.loads(path.read_text())
    assert [result["variant"] for result in report["results"]] == ["torch, one process", "DeepSpeed ZeRO-1, 2 ranks"]
    for result in report["results"]:
        assert result["step_seconds"] > 0
        assert [len(run) for run in result["overheads"]] == [1]
    assert report["bubbles"] is report["memory"] is None
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    assert not list(workdir.iterdir())
    assert "DeepSpeed" in capsys.readouterr().out  # further words may be on other lines


@pytest.mark.slow
def test_a_tiny_pipeline_commits_checkpoints_and_accounts_for_its_bubbles(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    main(path, TINY, ["bubbles"], tmp_path / "work")
    report = json.loads(path.read_text())
    assert [stage["stage"] for stage in report["bubbles"]["stages"]] == [0, 1]
    (result,) = report["results"]
    assert result["aim"] == 0.03
    assert path.with_name("overhead-bubbles.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_a_tiny_run_over_time_fails_is_predicted_and_its_memory_stays_within_the_arithmetic(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    main(path, TINY, ["memory"], tmp_path / "work")
    memory = json.loads(path.read_text())["memory"]
    assert memory["predicted"] is True
    assert memory["learned_checkpoints"][0] > 0
    assert all(memory["aims"].values())
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
