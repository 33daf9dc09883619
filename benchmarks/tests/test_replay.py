"""Windows of snapshots, small: what they cost, the comparison under real kills of real ranks, and ETTR."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.replay import run
from cpsr.benchmarks.replay.compared import EXACT, STALE, WAYS, WINDOW, WINDOWS, Plan, lost_tokens
from cpsr.benchmarks.replay.ettr import simulated
from cpsr.benchmarks.replay.job import Shape
from cpsr.benchmarks.replay.mixture import Mixture
from cpsr.benchmarks.replay.repeated_step import FROZEN, KINDS, WHOLE
from cpsr.benchmarks.tests.recovery.tiny import called_here, one_thread
from cpsr.demo.model import GPTConfig

SMALL = Plan(72, 1, 1, 32, Mixture(4, GPTConfig(layers=2, heads=2, width=16, context=16)))
RESTART = 4.0


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


@pytest.mark.slow
def test_every_way_meets_the_same_kills_and_only_stale_experts_lose_tokens(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    run.main(path, plan=SMALL, workdir=tmp_path, parts=["comparison"])
    report = json.loads(path.read_text())
    found = report["comparison"]["ways"]
    for name in EXACT:
        assert found[name]["methods"] == ["exact"]
        assert found[name]["lost_tokens"] == [0.0]
        assert found[name]["same_bits"] == [True]
    assert found[STALE]["methods"] == ["older experts"]
    assert found[STALE]["lost_tokens"][0] > 0
    assert found[STALE]["same_bits"] == [False]
    ((repeated,),) = found[WINDOWS]["repeated_iterations"]
    assert 4 <= repeated <= 8
    for name, own in found.items():  # who has a policy has profiled, and has set its own interval
        assert (own["persist_seconds"] is None) == (WAYS[name].policy is None)
    assert {one["system"] for one in report["ettr"]} == set(WAYS)


def test_tokens_are_lost_once_where_two_failures_go_back_to_the_same_checkpoint() -> None:
    assert lost_tokens([(0, 0.0), (27, 100.0), (27, 100.0)]) == 100.0
    assert lost_tokens([(0, 0.0), (27, 100.0), (54, 90.0)]) == 190.0
    assert lost_tokens([(0, 0.0), (54, 90.0), (27, 100.0)]) == 100.0


def test_windows_lose_one_and_a_half_of_their_length_a_failure(tmp_path: Path) -> None:
    ratio = {"value": 1.02, "low": 1.0, "high": 1.04}
    common = {"step_ratio": ratio, "down_seconds": [[RESTART]], "persist_seconds": None}
    ways = {WINDOWS: {**common, "intervals_iterations": [WINDOW]}}
    with measuring("replay", None, tmp_path, timed=False) as call:
        found = simulated(call, {"step_seconds": [0.1], "ways": ways})
    for one in found:
        recovery = one["restart_seconds"] + 1.5 * WINDOW * 0.1
        for name, overhead in (("ettr", 0.02), ("ettr_low", 0.04), ("ettr_high", 0.0)):
            expected = 1 / (1 + overhead) / (1 + recovery / (60.0 * one["mtbf_minutes"]))
            assert one[name] == pytest.approx(expected, abs=0.005)
