"""Windows of snapshots, small: what they cost."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.replay import run
from cpsr.benchmarks.replay.job import Shape
from cpsr.benchmarks.replay.repeated_step import FROZEN, KINDS, WHOLE
from cpsr.benchmarks.tests.recovery.tiny import called_here, one_thread


def test_every_variant_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "in_own_process", called_here)
    shape = Shape(width=16, layers=2, experts=2, tokens=64)
    path = tmp_path / "replay.json"
    with one_thread():
        run.main(path, steps=18, windows=(2,), shape=shape, workdir=tmp_path, parts=["windows"])
    assert set(json.loads(path.read_text())["ratios"]) == set(run.variants((2,)))


@pytest.mark.slow
def test_repeated_steps_leave_gradients_out(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    run.main(path, steps=1, workdir=tmp_path, parts=["repeated"])
    repeated = json.loads(path.read_text())["repeated"]
    assert all(set(repeated[kind]) == {WHOLE, *FROZEN} for kind in KINDS)


@pytest.mark.slow
def test_the_steps_of_a_pipeline_are_measured_with_logs_and_without(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    run.main(path, rounds=1, workdir=tmp_path, parts=["stages"])
    assert len(json.loads(path.read_text())["stages"]["ratios"]) == 3
