"""The arithmetic of stalls, and that a tiny run leaves everything behind."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.stall.job import Size
from cpsr.benchmarks.stall.measure import Block, SizeSamples
from cpsr.benchmarks.stall.result import summarise
from cpsr.benchmarks.stall.run import main

METHODS = {"cpsr", "dcp async_save", "dcp, reused buffers", "torch.save + fsync"}


def samples(*, ours: float, dcp: float) -> SizeSamples:
    """Steps of 1 s at first and 3 s at the end; CPSR's pair takes `ours` longer, DCP's `dcp`."""
    blocks = [
        Block("dcp async_save", 0, [1.0, 1.0], [1.0 + dcp, 1.0], 0.5),
        # Its neighbours are 1, 1 (before) and 3, 3 (after): a step without a checkpoint takes 2 s here.
        Block("cpsr", 0, [1.0, 1.0], [2.0, 2.0 + ours, 2.25], 4.0),
    ]
    return SizeSamples(100, blocks, after_seconds=[3.0, 3.0], memcpy_seconds=[0.5])


def test_the_stall_is_the_pair_less_its_neighbours_on_both_sides() -> None:
    ours, dcp = summarise("tiny", samples(ours=0.6, dcp=0.8)).methods
    assert (ours.name, dcp.name) == ("cpsr", "dcp async_save")
    assert ours.stalls == pytest.approx([0.6])
    assert ours.ratio.value == pytest.approx(0.6 / 0.5)
    assert ours.until_durable.value == pytest.approx(0.6 + 0.25)  # the third step belongs to it too
    assert ours.durable_seconds.value == 4.0
    assert dcp.stall.value == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("ours", "dcp", "expected"),
    [(0.6, 0.8, [True, True]), (0.7, 0.8, [False, True]), (0.6, 0.5, [True, False]), (0.9, 0.8, [False, False])],
)
def test_an_aim_is_met_or_missed(ours: float, dcp: float, expected: list[bool]) -> None:
    aims = summarise("tiny", samples(ours=ours, dcp=dcp)).aims()
    assert list(aims) == ["tiny: at most 1.3 x memcpy", "tiny: below DCP"]
    assert list(aims.values()) == expected


def test_an_interval_on_both_sides_of_the_aim_settles_nothing() -> None:
    # Stalls of 0.5 and 1.5 s in turns are 1 and 3 memcpys.
    ours = [Block("cpsr", number, [1.0, 1.0], [1.5 + number % 2, 1.0], 1.0) for number in range(12)]
    dcp = [Block("dcp async_save", number, [1.0, 1.0], [3.0, 1.0], 1.0) for number in range(12)]
    recorded = SizeSamples(100, ours + dcp, [1.0, 1.0], [0.5] * 12)
    result = summarise("tiny", recorded)
    assert result.methods[0].ratio.low <= 1.3 < result.methods[0].ratio.high
    assert result.unsettled
    assert not summarise("tiny", samples(ours=0.6, dcp=0.8)).unsettled


def test_a_tiny_run_leaves_figures_samples_and_a_plot_and_cleans_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, workdir = tmp_path / "out" / "stall.json", tmp_path / "work"
    main(path, pairs=2, workdir=workdir, sizes=[Size("tiny", width=32, layers=1, batch=8)])
    report = json.loads(path.read_text())
    assert report["machine"]["torch_threads"] > 0
    assert report["machine"]["cores"] > 0
    assert {"date", "cpu_model", "versions", "file_system"} <= report["machine"].keys()
    (result,) = report["results"]
    assert {method["name"] for method in result["methods"]} == METHODS
    assert all(len(method["stalls"]) == 2 and method["durable_seconds"]["value"] > 0 for method in result["methods"])
    recorded = report["samples"]["tiny"]
    assert recorded["state_bytes"] == result["state_bytes"] == 3 * 4 * (2 * 256 * 32 + 256 + 32 * 32 + 32)
    assert len(recorded["memcpy_seconds"]) == 2
    assert len(recorded["blocks"]) == 2 * len(METHODS)
    assert {block["method"] for block in recorded["blocks"][: len(METHODS)]} == METHODS
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert not list(workdir.iterdir())
    printed = capsys.readouterr().out
    assert "torch threads" in printed
    assert printed.count("pass") + printed.count("miss") == 2
