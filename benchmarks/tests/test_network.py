"""Pretraining the predictor's network, and judging it on runs that were left out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from cpsr.benchmarks.prior import network as measuring
from cpsr.benchmarks.prior.network import LINE, WAYS, Judged
from cpsr.benchmarks.prior.network_report import mean_cosine
from cpsr.benchmarks.prior.network_run import folds, main
from cpsr.benchmarks.prior.runs import PriorRun
from cpsr.benchmarks.tests.recovery.tiny import TINY
from cpsr.predictor.vitp_network import PARAMETERS, pretrained_parameters

SHIPPED = Path(__file__).resolve().parents[2] / "predictor" / "vitp_weights.safetensors"
RUNS = [PriorRun(TINY, 100, "first"), PriorRun(replace(TINY, name="tiny-other"), 101, "second")]


def test_runs_are_left_out_by_group_or_else_by_schedule() -> None:
    assert folds(RUNS) == {"first": [RUNS[0]], "second": [RUNS[1]]}
    of_one = [replace(RUNS[0], group="one"), replace(RUNS[1], group="one")]
    assert folds(of_one) == {TINY.schedule: of_one}


def test_it_writes_weights_and_figures_and_goes_on_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measuring, "STEPS", 3)
    monkeypatch.setattr(measuring, "WAYS", WAYS[:3:2])
    weights, first, second = (tmp_path / name for name in ("weights.safetensors", "first.json", "second.json"))
    main(tmp_path, 1, weights, first, runs=RUNS)
    assert load_file(weights)["parameters"].shape == (PARAMETERS,)
    content = weights.read_bytes()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/network/*.json")}
    assert len(kept) == len(RUNS)
    main(tmp_path, 1, weights, second, runs=RUNS)
    assert weights.read_bytes() == content, "the same runs give the same file"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/network/*.json")} == kept
    report = json.loads(second.read_text())
    assert report["judged"] == json.loads(first.read_text())["judged"]
    assert {(one["run"], one["left_out"], one["interval"]) for one in report["judged"]} == {
        (run.workload.name, run.group, interval) for run in RUNS for interval in measuring.INTERVALS
    }
    assert report["data"]["runs"] == {TINY.name: 100, "tiny-other": 101}
    for one in report["judged"]:
        assert len(one["iterations"]) == len(one["cosines"][LINE]) > 0
        assert all(-1.0 <= value <= 1.0 for values in one["cosines"].values() for value in values)
    assert first.with_suffix(".png").exists()
    assert "Mean cosine with the motion" in capsys.readouterr().out


def test_the_early_part_is_that_of_the_oldest_checkpoints() -> None:
    one = Judged("a", "b", 50, (200, 250, 300), {LINE: (0.3, 0.6, 0.9)})
    assert mean_cosine([one], LINE) == pytest.approx(0.6)
    assert mean_cosine([one], LINE, 1 / 3) == pytest.approx(0.3)


def test_the_shipped_weights_are_read() -> None:
    assert torch.equal(torch.from_numpy(load_file(SHIPPED)["parameters"]), pretrained_parameters())
