"""The events that callbacks of `recovery.on_event` get, in lives that end in every way."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cpsr import Committed, CPSRRecovery, Leaving, Restored, RolledBack, TorchAdapter
from cpsr.journal import JournalReader
from cpsr.life.events import Event
from tests.committed import wait_until_committed

INTERVAL = 4


class Stopped(Exception):  # noqa: N818 - a failure of the machine, not an error of the code
    """What ends a life in the middle of the loop."""


def train(
    run_dir: Path,
    iterations: int,
    seen: list[Any],
    *,
    mode: str = "exact",
    fail_at: int | None = None,
    scale: float = 1.0,
    late: bool = False,
    sigterm_at: int | None = None,
) -> CPSRRecovery:
    """One life of a small loop, whose steps and events go into `seen`; targets are scaled by `scale`."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    config = {
        "run_dir": str(run_dir),
        "mode": mode,
        "checkpoint": {"interval_iterations": INTERVAL, "shared_memory": False},
    }
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(8)]
    recovery = CPSRRecovery(TorchAdapter(Losing(module), optimizer), config)
    if not late:
        recovery.on_event(seen.append)
    with recovery:
        if late:
            recovery.on_event(seen.append)
        for x, y in recovery.resume(data, repeat=True):
            if recovery.iteration >= iterations:
                break
            if recovery.iteration == fail_at:
                raise Stopped
            if recovery.iteration == sigterm_at:
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.zero_grad()
            recovery.life.job.adapter.module(x, y * scale).backward()
            optimizer.step()
            if fail_at is not None and recovery.iteration % INTERVAL == 1 and recovery.iteration > INTERVAL:
                wait_until_committed(run_dir, recovery.iteration - 1)
            seen.append(recovery.iteration)
    return recovery


class Losing(nn.Module):
    """Returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.inner(x), y)


def events(seen: list[Any]) -> list[Event]:
    return [one for one in seen if not isinstance(one, int)]


def fail(run_dir: Path, at: int, **options: Any) -> list[Any]:
    seen: list[Any] = []
    with pytest.raises(Stopped):
        train(run_dir, 2 * at, seen, fail_at=at, **options)
    return seen


def test_a_life_from_scratch(tmp_path: Path) -> None:
    seen: list[Any] = []
    train(tmp_path, 6, seen)
    first, *later = events(seen)
    assert isinstance(first, Restored)
    assert first == Restored(0, None, None, "nothing", False, 0, first.reason, ranks=1, previous_ranks=1)
    assert seen[0] is first
    assert later[-1] == Committed(6)  # the last state
    assert {type(one) for one in later} == {Committed}
    assert len(set(later)) == len(later)


@pytest.mark.parametrize("late", [False, True])
def test_a_restart_names_what_is_trained_again(tmp_path: Path, late: bool) -> None:
    fail(tmp_path, 11)
    seen: list[Any] = []
    train(tmp_path, 12, seen, late=late)
    first = seen[0]
    assert isinstance(first, Restored)
    assert (first.iteration, first.failure_iteration, first.checkpoint_iteration) == (8, 11, 8)
    assert (first.source, first.predicted, first.lost_iterations) == ("disk", False, 3)
    assert seen[1] == 9


def test_a_predicted_state_that_diverges(tmp_path: Path) -> None:
    """The roll-back is told after the loop has finished the discarded step, and before it trains the next one."""
    fail(tmp_path, 23, mode="predict")
    seen: list[Any] = []
    train(tmp_path, 30, seen, mode="predict", scale=1e4)
    first, back = (one for one in events(seen) if not isinstance(one, Committed))
    assert isinstance(first, Restored)
    assert (first.iteration, first.source, first.predicted, first.lost_iterations) == (23, "prediction", True, 0)
    assert isinstance(back, RolledBack)
    assert back.to_iteration == 20
    assert back.from_iteration > 23
    at = seen.index(back)
    assert seen[at - 1] == 20  # the loop has asked for its iteration already
    assert seen[at - 2] == back.from_iteration - 1
    assert next(one for one in seen[at:] if isinstance(one, int)) == 21


def test_leaving_after_sigterm(tmp_path: Path) -> None:
    seen: list[Any] = []
    with pytest.raises(SystemExit):
        train(tmp_path, 9, seen, sigterm_at=5)
    left = next(one for one in seen if isinstance(one, Leaving))
    assert (left.reason, left.saved) == ("sigterm", True)
    assert seen.index(Committed(left.iteration)) < seen.index(left)
    again: list[Any] = []
    train(tmp_path, 9, again)
    assert isinstance(again[0], Restored)
    assert (again[0].iteration, again[0].failure_iteration) == (left.iteration, None)


def test_an_error_in_a_callback_is_recorded_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(list[Any]):
        def append(self, one: Any) -> None:
            if isinstance(one, Restored):
                raise KeyError("no such run")
            super().append(one)

    seen = Broken()
    recovery = train(tmp_path, 6, seen)
    assert recovery.iteration == 6
    assert Committed(6) in seen
    with JournalReader(tmp_path / "journal.db") as journal:
        (recorded,) = [row for row in journal.events() if row.kind == "callback failed"]
    assert "failed at Restored with KeyError: 'no such run'" in recorded.message
    assert recorded.message in caplog.text
