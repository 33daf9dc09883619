"""Lives with an optimizer that cannot be predicted, and with another one than the run had."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.errors import RunMismatchError, UnsupportedEngineError
from cpsr.journal.reader import JournalReader
from tests.committed import wait_until_committed
from tests.engines.optimizer_cases import train_step

INTERVAL = 3
DATA: Any = torch.arange(60.0).reshape(-1, 2)
Make = Callable[[nn.Module], Any]


class Model(nn.Module):
    """Returns its loss; one parameter has no gradient in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 6), nn.Linear(6, 3)
        self.late = nn.Parameter(torch.ones(3, 2))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(batch / 60.0)))
        loss: torch.Tensor = hidden.square().mean()
        return loss + self.late.square().sum() * 0.1 if batch[0, 0] > 24 else loss


class Life:
    """One life of the job."""

    def __init__(self, run_dir: Path, make: Make, mode: Literal["auto", "exact"] = "auto") -> None:
        torch.manual_seed(0)
        self.module = Model()
        made = make(self.module)
        self.optimizers = made if isinstance(made, list) else [made]
        checkpoint = {"interval_iterations": INTERVAL, "shared_memory": False}
        config = {"run_dir": str(run_dir), "mode": mode, "checkpoint": checkpoint}
        self._run_dir = run_dir
        self.recovery = CPSRRecovery(TorchAdapter(self.module, made), config)

    def until(self, iteration: int, *, fails: bool = False) -> "Life":
        try:
            with self.recovery as recovery:
                self._train(recovery, iteration)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        return self

    def _train(self, recovery: CPSRRecovery, until: int) -> None:
        began = recovery.iteration
        for batch in recovery.resume(DataLoader(DATA, batch_size=2), repeat=True):
            train_step(self.module, self.optimizers, batch)
            last = recovery.iteration - 1
            if last > began and last % INTERVAL == 0:  # the snapshot of the step before is complete
                wait_until_committed(self._run_dir, last)
            if recovery.iteration >= until:
                return


def events(run_dir: Path) -> dict[str, str]:
    with JournalReader(run_dir / "journal.db") as reader:
        return {event.kind: event.message for event in reader.events()}


def test_what_is_not_predicted_is_recomputed_and_said(tmp_path: Path) -> None:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.NAdam(module.parameters(), lr=0.01)

    Life(tmp_path, make).until(20, fails=True)
    message = events(tmp_path)["predicting is off"]
    assert "steps of NAdam" in message
    again = Life(tmp_path, make).until(22)
    assert again.recovery.config.mode == "exact"
    assert (again.recovery.restored.method, again.recovery.restored.restored_iteration) == ("exact", 18)


@pytest.mark.parametrize(
    ("now", "error", "message"),
    [
        (lambda module: torch.optim.NAdam(module.parameters()), RunMismatchError, "optimizer.*Adafactor.*NAdam"),
        (
            lambda module: torch.optim.Adafactor([{"params": [one]} for one in module.parameters()], lr=0.01),
            UnsupportedEngineError,
            "the saved Adafactor has 1 parameter groups and this one 5",
        ),
    ],
)
def test_a_restart_with_something_else_is_refused(
    now: Make, error: type[Exception], message: str, tmp_path: Path
) -> None:
    Life(tmp_path, lambda module: torch.optim.Adafactor(module.parameters(), lr=0.01), "exact").until(8, fails=True)
    with pytest.raises(error, match=message):
        Life(tmp_path, now, "exact").until(12)
