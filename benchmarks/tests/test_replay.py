"""Windows of snapshots, small: what they cost, the comparison under real kills of real ranks, and ETTR."""

import json
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.replay import run
from cpsr.benchmarks.replay.compared import (
    CONTROL,
    DENSE,
    STALE,
    WINDOW,
    WINDOWS,
    Plan,
    compare,
    lag_iterations,
    lost_tokens,
)
from cpsr.benchmarks.replay.ettr import simulated, windows_of
from cpsr.benchmarks.replay.job import Shape
from cpsr.benchmarks.replay.mixture import Mixture
from cpsr.benchmarks.replay.repeated_step import FROZEN, KINDS, WHOLE
from cpsr.benchmarks.tests.recovery.tiny import called_here, one_thread
from cpsr.demo.model import GPTConfig

SMALL = Plan(48, 1, 1, Mixture(4, GPTConfig(layers=2, heads=2, width=16, context=16)), interval_iterations=5)
RESTART = 4.0


def test_every_variant_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "in_own_process", called_here)
    shape = Shape(width=16, layers=2, experts=2, tokens=64)
    path = tmp_path / "replay.json"
    with one_thread():
        run.main(path, rounds=1, steps=6, windows=(2,), shape=shape, workdir=tmp_path, parts=["windows"])
    assert set(json.loads(path.read_text())["ratios"]) == {"alone", *run.variants((2,))}


@pytest.mark.slow
def test_repeated_steps_leave_gradients_out(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    run.main(path, steps=1, workdir=tmp_path, parts=["repeated"])
    repeated = json.loads(path.read_text())["repeated"]
    assert all(set(repeated[kind]) == {WHOLE, *FROZEN} for kind in KINDS)


@pytest.mark.slow
def test_the_steps_of_a_pipeline_are_measured_with_logs_and_without(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    run.main(path, rounds=1, steps=2, workdir=tmp_path, parts=["stages"])
    assert len(json.loads(path.read_text())["stages"]["ratios"]) == 3


@pytest.mark.slow
def test_every_way_meets_the_same_kills_and_only_stale_experts_lose_tokens(tmp_path: Path) -> None:
    with measuring("replay", None, tmp_path, timed=False) as call:
        found = json.loads(json.dumps(compare(call, SMALL)))["ways"]
    for name in (DENSE, WINDOWS):
        assert found[name]["methods"] == ["exact"]
        assert found[name]["lost_tokens"] == [0.0]
        assert found[name]["lag_iterations"] == [0.0]
        assert found[name]["same_bits"] == [True]
    assert found[STALE]["methods"] == ["stale"]
    assert found[STALE]["lost_tokens"][0] > 0
    assert found[STALE]["same_bits"] == [False]
    ((repeated,),) = found[WINDOWS]["repeated_iterations"]
    assert 4 <= repeated <= 8


def test_a_lag_is_the_gap_over_what_an_iteration_is_worth() -> None:
    control = {at: 5.0 - 0.01 * at for at in range(100)}
    behind = {at: 5.0 - 0.01 * (at - 3) for at in range(100)}
    assert lag_iterations(behind, control, 20) == pytest.approx((3.0, 0.03))
    assert lag_iterations(control, control, 20) == (0.0, 0.0)


def test_tokens_are_lost_once_where_two_failures_go_back_to_the_same_checkpoint() -> None:
    assert lost_tokens([(0, 0.0), (27, 100.0), (27, 100.0)]) == 100.0
    assert lost_tokens([(0, 0.0), (27, 100.0), (54, 90.0)]) == 190.0
    assert lost_tokens([(0, 0.0), (54, 90.0), (27, 100.0)]) == 100.0


def comparison() -> dict[str, object]:
    """What `compare` returns, in round numbers."""
    ways = {
        name: {"step_seconds": [step], "down_seconds": [[RESTART]]}
        for name, step in ((CONTROL, 0.1), (DENSE, 0.101), (STALE, 0.101), (WINDOWS, 0.102))
    }
    costs = {"stall_seconds": 0.02, "persist_seconds": 0.8}
    every = {DENSE: {**costs, "interval_iterations": 9}, STALE: {**costs, "interval_iterations": 7}}
    return {"ways": ways, "checkfreq": every}


def test_windows_lose_one_and_a_half_of_their_length_a_failure(tmp_path: Path) -> None:
    ratios = {"alone": {"value": 1.0}, "windows of 8": {"value": 0.99}}
    windows = windows_of(comparison(), ratios)
    assert windows == {WINDOWS: (WINDOW, pytest.approx(0.02)), "windows of 8, one process": (8, 0.0)}
    with measuring("replay", None, tmp_path, timed=False) as call:
        found = simulated(call, comparison(), ratios)
    for one in found:
        if one["system"] not in windows:
            continue
        length, overhead = windows[one["system"]]
        recovery = one["restart_seconds"] + 1.5 * length * 0.1
        expected = 1 / (1 + overhead) / (1 + recovery / (60.0 * one["mtbf_minutes"]))
        assert one["ettr"] == pytest.approx(expected, abs=0.005)
