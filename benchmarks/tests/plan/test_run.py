import json
from pathlib import Path

import pytest

from cpsr.benchmarks.plan import run
from cpsr.benchmarks.plan.timing import KINDS, measure


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_timed(kind: str) -> None:
    timing = measure(kind, 3, 2)
    assert (timing.ranks, timing.kind) == (3, kind)
    assert 0 < timing.median_seconds <= timing.longest_seconds


def test_figures_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(run, "RANKS", (1, 2))
    monkeypatch.setattr(run, "REPEATS", 1)
    run.main(tmp_path / "plan.json")
    report = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert len(report["results"]) == 2 * len(KINDS)
    assert (tmp_path / "plan.png").stat().st_size > 0
    assert "Time of one plan" in capsys.readouterr().out
