"""The arithmetic of prediction's cost, and that a tiny run leaves everything behind."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.predictor_cost import run
from cpsr.benchmarks.predictor_cost.measure import MethodSamples
from cpsr.benchmarks.predictor_cost.run import CHECKPOINTS, main, result_of
from cpsr.benchmarks.tests.recovery.tiny import called_here
from cpsr.demo.model import GPTConfig

MIB = 2**20
TINY = GPTConfig(layers=1, heads=2, width=16, context=8, vocabulary=97)


def test_rates_count_forecast_and_prediction_and_ratios_are_of_the_same_turn() -> None:
    # The second turn was slow as a whole, which leaves both bounds of a ratio where they are.
    samples = MethodSamples("line", 100, 10, 7.5, [0.1, 0.2], [1.0, 4.0, 1.0], [1.0, 5.0, 1.0], [1.0, 3.0, 1.0])
    found = result_of(samples, training=1.0)
    assert found["rate"]["value"] == pytest.approx(100 / 2)
    assert found["ratio"] == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})
    assert found["ratio_of_predict"]["value"] == pytest.approx(1.0)
    assert list(found["aims"].values()) == [True, True, False]


def test_a_tiny_run_leaves_figures_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "in_own_process", called_here)
    path, workdir = tmp_path / "predictor.json", tmp_path / "work"
    main("default,line", 2, workdir, path, config=TINY)
    report = json.loads(path.read_text())
    assert report["checkpoints"] == CHECKPOINTS
    default, line = report["results"]
    for found in (default, line):
        assert found["ratio"]["value"] > 0
        assert 0 <= found["peak_bytes"] < 100 * MIB
    assert default["learn_seconds"] > line["learn_seconds"] == 0.0
    assert not list(workdir.iterdir())
