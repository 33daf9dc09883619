"""When nothing is rehearsed: one line says why, and training takes no notice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.journal import Beginning, JournalReader, RehearsalRow
from cpsr.predictor.protocol import Forecast
from cpsr.rehearsal.rehearsal import Rehearsed
from cpsr.rehearsal.rehearsals import _learned, rehearsed_horizon
from cpsr.restart.restore import Restored

ITERATIONS = 150
EAGER = {"budget_fraction": 1.0, "iterations": 8, "min_interval_iterations": 0}


def train(run_dir: Path, mode: str, rehearsal: dict[str, Any]) -> list[str]:
    """One life of a plain torch loop; what it says of rehearsals."""
    torch.manual_seed(0)
    module = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    checkpoint = {"interval_iterations": 10, "fsync": False}
    config = {"run_dir": run_dir, "mode": mode, "checkpoint": checkpoint, "rehearsal": rehearsal}
    with CPSRRecovery(TorchAdapter(module, optimizer), config) as recovery:
        for _ in range(ITERATIONS):
            module(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if recovery.iteration % 10 == 9:
                recovery.life.saver.drain(10)  # tiny steps would outrun the disk
    with JournalReader(run_dir / "journal.db") as journal:
        assert journal.rehearsals() == []
        return [event.message for event in journal.events() if event.kind == "rehearsals off"]


@pytest.mark.parametrize(
    ("mode", "rehearsal", "why"),
    [
        ("exact", EAGER, "mode 'exact' never predicts"),
        ("auto", {"budget_fraction": 0.0}, "rehearsal.budget_fraction is 0"),
        ("auto", EAGER, "a plain torch loop is not known to CPSR"),
    ],
)
def test_why_nothing_is_rehearsed_is_reported_once(
    tmp_path: Path, mode: str, rehearsal: dict[str, Any], why: str
) -> None:
    (message,) = train(tmp_path, mode, rehearsal)
    assert why in message


@given(before=st.integers(0, 1000), interval=st.integers(1, 500))
def test_failures_are_rehearsed_all_over_the_interval(before: int, interval: int) -> None:
    horizons = [rehearsed_horizon(before + count, interval) for count in range(8)]
    assert all(1 <= horizon <= interval for horizon in horizons)
    quarters = {min(int(4 * (horizon - 0.5) / interval), 3) for horizon in horizons}
    assert interval < 8 or quarters == {0, 1, 2, 3}  # any eight in a row reach every quarter


def test_a_short_run_earns_none_and_hears_nothing_of_it(tmp_path: Path) -> None:
    assert train(tmp_path, "auto", {}) == []


def running(life: int) -> RehearsalRow:
    return RehearsalRow(
        id=f"row {life}",
        life=life,
        iteration=90,
        failure_iteration=80,
        checkpoint_iteration=70,
        outcome="running",
        cost_seconds=1.0,
    )


def plain_job(run_dir: Path) -> CPSRRecovery:
    module = nn.Linear(4, 1)
    config = {"run_dir": run_dir, "checkpoint": {"fsync": False}, "rehearsal": EAGER}
    return CPSRRecovery(TorchAdapter(module, torch.optim.AdamW(module.parameters())), config)


def test_a_run_that_rehearsals_have_killed_twice_rehearses_no_more(tmp_path: Path) -> None:
    for life in range(1, 4):
        with plain_job(tmp_path) as recovery:
            recovery.life.job.journal.record(running(life))
    with JournalReader(tmp_path / "journal.db") as journal:
        (off,) = [event for event in journal.events() if event.kind == "rehearsals off"]
    assert off.life == 2, "the third one"
    assert "2 earlier lives of this run ended during one" in off.message


def test_a_proposal_does_not_outlive_the_state_that_it_was_made_for(tmp_path: Path) -> None:
    with plain_job(tmp_path) as recovery:
        rehearsals = recovery.life.rehearsals
        rehearsals.prepare(7, 10)
        assert rehearsals.prepared is not None
        rehearsals.not_before, rehearsals.looked_at = 500, 7
        recovery.life.after_external_load(9)
        assert rehearsals.prepared is None
        assert (rehearsals.not_before, rehearsals.looked_at) == (0, None)
        recovery.life.run.store.pinned_iteration = 7
        rehearsals.prepare(7, 10)  # agreed from a vote of before
        assert rehearsals.prepared is None
        assert recovery.life.run.store.pinned_iteration is None
        recovery.life.run.store.pinned_iteration = 9
        rehearsals.prepare(7, 10)
        assert recovery.life.run.store.pinned_iteration == 9  # proposed since
        rehearsals.prepare(9, 10)
        assert rehearsals.prepared is not None


@pytest.mark.parametrize(
    ("outcome", "method", "guard", "feasible", "recorded"),
    [
        ("refused", "exact", {"loss": {"accepted": False}}, True, True),
        ("diverged", "line", {"loss": {"accepted": True}}, True, True),
        ("refused", "exact", {}, False, False),  # nothing was predicted
        ("refused", "line", {"loss": {"accepted": True}}, True, False),  # the job was asked to leave
        ("failed", "line", {"loss": {"accepted": True}}, True, False),
    ],
)
def test_a_prediction_that_no_restart_could_use_is_as_dear_as_two_horizons(
    outcome: Any, method: str, guard: dict[str, Any], feasible: bool, recorded: bool
) -> None:
    forecast = Forecast("line", feasible, {}, 5.0, "why", settings={"gain": 2.0})
    restored = Restored(Beginning.of(method), 80, 70, 80, "why", forecast=forecast, guard=guard)
    learned = _learned(running(1), Rehearsed(outcome, "why", restored))
    assert (learned is not None) == recorded
    if learned is not None:
        assert learned["settings"] == {"gain": 2.0}
        assert (learned["lag_iterations"], learned["standard_error_iterations"]) == (20.0, 10.0)
