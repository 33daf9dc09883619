"""When nothing is rehearsed: one line says why, and training takes no notice."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.coordinator.schedule import rehearsed_horizon
from cpsr.journal import JournalReader

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
                recovery._writer.drain(10)  # tiny steps would outrun the disk
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
def test_why_nothing_is_rehearsed_is_said_once(tmp_path: Path, mode: str, rehearsal: dict[str, Any], why: str) -> None:
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
