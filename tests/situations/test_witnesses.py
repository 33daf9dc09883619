"""Loops that a restart brings back, and loops that it does not: each repeated step is compared with its first run."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.journal import JournalReader
from cpsr.state.witness import read_witnesses
from tests.situations.lives import Life, alone_and_cut, backward, digest

KILLED_AT = 13  # three steps after the checkpoint


def training(life: Life) -> str:
    """A loop with the fault that `life.options` names."""
    fault = life.options.get("fault", "")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs, targets = torch.randn(160, 8), torch.randn(160, 4)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    own = torch.Generator().manual_seed(1)  # a generator that nobody saves
    calls = 0
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config(**life.options.get("config", {}))) as recovery:
        for x, y in recovery.resume(loader, epochs=1):
            calls += 1
            if fault == "learning rate":
                optimizer.param_groups[0]["lr"] = 1e-2 / calls
            if fault == "batches":
                rows = torch.randint(0, 160, (8,), generator=own)
                x, y = inputs[rows], targets[rows]
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            backward(loss)
            if fault == "gradient" and calls % 3 == 1:
                torch._foreach_mul_([one.grad for one in model.parameters() if one.grad is not None], 0.5)
            optimizer.step()
            life.step(recovery.iteration)
    return digest(model)


def events(folder: Path) -> list[tuple[str, int | None, str]]:
    with JournalReader(folder / "run" / "journal.db") as reader:
        return [(event.kind, event.iteration, event.message) for event in reader.events()]


def verdicts(folder: Path) -> list[tuple[str, int | None, str]]:
    return [one for one in events(folder) if one[0] in ("checked", "arithmetic", "not restored")]


def test_a_loop_that_comes_back_is_checked(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(training, tmp_path, at=KILLED_AT)
    assert cut.result == alone.result
    assert verdicts(tmp_path / "alone") == []
    assert verdicts(tmp_path / "cut") == [("checked", 13, "exact, checked over 3 repeated steps")]
    assert [one.iteration for one in read_witnesses(tmp_path / "cut" / "run", 0)] == list(range(1, 21))


@pytest.mark.parametrize(
    ("fault", "what"), [("learning rate", "learning rate"), ("batches", "weights"), ("gradient", "weights")]
)
def test_what_differs_first(tmp_path: Path, fault: str, what: str) -> None:
    alone, cut = alone_and_cut(training, tmp_path, at=KILLED_AT, fault=fault)
    assert cut.result != alone.result
    ((kind, iteration, message),) = verdicts(tmp_path / "cut")
    assert (kind, iteration) == ("not restored", 11)
    assert f"the {what} differs first" in message
