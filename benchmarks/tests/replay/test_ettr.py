"""ETTR from measured inputs."""

from pathlib import Path

import pytest

from cpsr.benchmarks.harness.measurement import measuring
from cpsr.benchmarks.replay.compared import CONTROL, DENSE, STALE, WINDOW, WINDOWS
from cpsr.benchmarks.replay.ettr import simulated, windows_of

RESTART = 4.0


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
