"""The whole command over a net that trains in a moment."""

import json
from functools import partial
from pathlib import Path

import pytest

from cpsr.benchmarks.boost import run as running
from cpsr.benchmarks.boost import selection
from cpsr.benchmarks.boost.run import SETTINGS, main
from cpsr.benchmarks.boost.selection import SELECTION_SEEDS
from cpsr.benchmarks.recovery.ending import Ended
from cpsr.benchmarks.recovery.workload import TASKS
from cpsr.benchmarks.tests.recovery.tiny import TinyTask, one_thread
from cpsr.benchmarks.tune.space import Setting
from cpsr.benchmarks.tune.sweep import Rate, Sweep

TINY = Setting("tiny", "cosine10", 400)
# Far below the best rate of a net without noise, where every further iteration helps.
SLOW = Sweep(TINY, (Rate(2, 2e-3, (Ended(0.1, 0.01, 1.0),)),))


def test_a_call_leaves_figures_and_a_plot_and_goes_on_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TASKS, "tiny", partial(TinyTask, noise=0.0, batch_rows=64))
    monkeypatch.setattr(running, "sweep", lambda settings, seeds, cache, device, pool, first_seed: [SLOW])
    monkeypatch.setattr(selection, "MOVES", selection.MOVES[-2:])
    monkeypatch.setattr(selection, "OUTERS", selection.OUTERS[:1])
    path, cache = tmp_path / "boost.json", tmp_path / "cache"
    with one_thread():
        main([TINY], 3, cache, path)
    report = json.loads(path.read_text())
    (corpus,) = report["corpora"]
    assert corpus["rule_met"] is report["rule_met"]
    assert [len(saved["percent"]) for saved in corpus["saved"]] == [3] * 5
    assert {trial["seed"] for trial in corpus["selection"]} == set(SELECTION_SEEDS)
    assert path.with_suffix(".png").stat().st_size > 5000
    assert "outer optimizer" in capsys.readouterr().out
    times = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    with one_thread():
        main([TINY], 3, cache, path)
    again = json.loads(path.read_text())
    assert again["corpora"] == report["corpora"]
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == times


def test_every_corpus_has_a_task() -> None:
    assert {setting.task for setting in SETTINGS} <= set(TASKS)
    assert not set(SELECTION_SEEDS) & set(range(5))
