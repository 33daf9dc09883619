"""Sweeps of the peak rate over a net that trains in a moment."""

import json
import math
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.machine import describe_machine
from cpsr.benchmarks.harness.processes import Workers
from cpsr.benchmarks.recovery.ending import Ended, Training
from cpsr.benchmarks.recovery.workload import TASKS
from cpsr.benchmarks.tests.recovery.tiny import TinyTask
from cpsr.benchmarks.tune.report import draw, plain
from cpsr.benchmarks.tune.run import main
from cpsr.benchmarks.tune.space import Setting, rate_of, settings
from cpsr.benchmarks.tune.sweep import Rate, Sweep, sweep
from cpsr.errors import ConfigError, CPSRError

TINY = Setting("tiny", "cosine", 60)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "tiny", TinyTask)


def swept(cache: Path, *chosen: Setting) -> list[Sweep]:
    with Workers(1) as pool:
        return sweep(chosen, 2, cache, "cpu", pool)


def test_the_best_rate_has_two_on_either_side(tmp_path: Path) -> None:
    for one in swept(tmp_path, TINY, Setting("tiny", "wsd", 60), Setting("tiny", "wsd", 60, "sgd")):
        steps = [rate.step for rate in one.rates]
        assert steps == list(range(steps[0], steps[-1] + 1))
        assert steps[0] + 2 <= one.best.step <= steps[-1] - 2
        assert all(rate.loss >= one.best.loss for rate in one.rates)
        assert one.best.peak > 2e-3, "sixty steps need a high rate"
        assert one.best.peak == rate_of(one.best.step, one.setting.optimizer)


def test_what_was_trained_is_not_trained_again(tmp_path: Path) -> None:
    first = swept(tmp_path, TINY)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert swept(tmp_path, TINY) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_seeds_begin_where_they_are_asked_for(tmp_path: Path) -> None:
    with Workers(1) as pool:
        sweep([TINY], 2, tmp_path, "cpu", pool, first_seed=10)
    assert {path.name.split("-seed")[1].split("-")[0] for path in tmp_path.iterdir()} == {"10", "11"}


def test_a_training_that_diverges_is_the_worst(tmp_path: Path) -> None:
    ended = Training(Setting("tiny", "constant", 100).workload(200), 0, tmp_path, "cpu").ended()
    assert ended.loss is None
    assert Rate(200, 1e26, (ended, Ended(0.1, 0.01, 1.0))).loss == math.inf


def test_a_best_rate_beyond_what_is_tried_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsr.benchmarks.tune.sweep.LIMIT", 4)
    with pytest.raises(CPSRError, match="lies at the end of what is tried"):
        swept(tmp_path, Setting("tiny", "cosine", 20))


def test_settings_are_every_combination() -> None:
    assert settings("digits,tiny", "wsd", "60,100") == [
        Setting(task, "wsd", length) for task in ("digits", "tiny") for length in (60, 100)
    ]
    assert settings("tiny", "wsd", "60", "sgd,adamw") == [
        Setting("tiny", "wsd", 60, optimizer) for optimizer in ("adamw", "sgd")
    ]
    for wrong in (
        ("none", "wsd", "60", "sgd"),
        ("tiny", "linear", "60", "sgd"),
        ("tiny", "wsd", "x", "sgd"),
        ("tiny", "wsd", "60", "lion"),
    ):
        with pytest.raises(ConfigError):
            settings(*wrong)


def test_a_call_leaves_figures_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tune.json"
    main([TINY], 2, tmp_path / "cache", path)
    assert "tiny-cosine-60" in capsys.readouterr().out
    report = json.loads(path.read_text())
    (setting,) = report["settings"]
    steps = [rate["step"] for rate in setting["rates"]]
    assert setting["best_peak_learning_rate"] in [rate_of(step, "adamw") for step in steps]
    assert path.with_suffix(".png").stat().st_size > 5000


def test_one_seed_and_a_divergence_can_be_shown(tmp_path: Path) -> None:
    rates = tuple(Rate(step, 1e-3, (Ended(loss, None, 1.0),)) for step, loss in ((1, 2.0), (2, 1.5), (3, None)))
    one = Sweep(TINY, rates)
    assert one.best.step == 2
    assert len(plain([one])[0]["rates"]) == 3
    assert len(draw([one], describe_machine(tmp_path, "cpu")).axes) == 1
