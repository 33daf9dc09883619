"""Loops that change weights for forward and backward, or for an evaluation, while a snapshot copies them."""

import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.journal import JournalReader
from tests.situations.lives import Life, alone_and_cut, backward, digest

ROWS = 20_000  # a copy of this embedding takes longer than the way to the forward


def noisy(life: Life) -> str:
    """A loop that puts its weights back before the update; `life.options` says what it does to them, and how."""
    how, data = life.options["kind"], life.options["data"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randint(0, ROWS, (160,)), torch.randn(160, 4)), batch_size=8, shuffle=True)
    parameters = list(model.parameters())
    average = [one.detach().clone() for one in parameters]

    def write(values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for one, value in zip(reversed(parameters), reversed(values), strict=True):
                (one.data if data else one).copy_(value)

    with CPSRRecovery(TorchAdapter(model, optimizer), life.config(**life.options["config"])) as recovery:
        for x, y in recovery.resume(loader, epochs=1):
            kept = [one.detach().clone() for one in parameters]
            if how == "noise":
                write([one + 0.01 * torch.randn_like(one) for one in kept])
            elif how == "one layer":
                write([*kept[:-1], kept[-1] + 0.01])
            elif how == "evaluation":
                write(average)
                with torch.no_grad():
                    model.eval()(x)
                model.train()
                write(kept)
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            backward(loss)
            if how == "adversarial":  # rows of the batch alone, as FGM and AWP do
                gradients = [one.grad for one in parameters if one.grad is not None]
                write([one + 0.1 * gradient for one, gradient in zip(kept, gradients, strict=True)])
                backward(torch.nn.functional.mse_loss(model(x), y))
            write(kept)
            optimizer.step()
            for mean, one in zip(average, parameters, strict=True):
                mean.lerp_(one.detach(), 0.1)
            life.step(recovery.iteration)
            time.sleep(0.02)
    return digest(model)


def told(folder: Path) -> int:
    with JournalReader(folder / "run" / "journal.db") as reader:
        texts = [one.message for one in reader.events()] + [one.reason for one in reader.checkpoints()]
    return sum("the loop changes weights between a step and the next update" in text for text in texts)


@pytest.mark.parametrize(("kind", "data"), [("one layer", False), ("evaluation", True), ("adversarial", False)])
def test_no_snapshot_in_memory_holds_weights_that_are_put_back(tmp_path: Path, kind: str, data: bool) -> None:
    config = {"memory": {"interval_iterations": 1}}
    alone, cut = alone_and_cut(noisy, tmp_path, at=13, kind=kind, data=data, config=config)
    assert cut.result == alone.result
    assert told(tmp_path / "alone") == 1


def last_rows(life: Life) -> str:
    """A loop that changes the last rows of a large embedding as soon as it has its batch, and then puts them back."""
    rows = 100_000
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(rows, 64), torch.nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randint(0, rows, (160,)), torch.randn(160, 4)), batch_size=8, shuffle=True)
    last = next(model.parameters()).data[-1000:]
    kept = last.clone()
    replay = {"enabled": True, "window_iterations": 2}
    config = life.config(replay=replay, checkpoint={"interval_iterations": 100})
    with CPSRRecovery(TorchAdapter(model, optimizer), config) as recovery:
        for x, y in recovery.resume(loader, epochs=1):
            kept.copy_(last)
            last.add_(1.0)
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            backward(loss)
            last.copy_(kept)
            optimizer.step()
            life.step(recovery.iteration)
    return digest(model)


def test_no_window_holds_weights_that_are_put_back(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(last_rows, tmp_path, at=13)
    assert cut.result == alone.result
    assert "Training continues at iteration 1" in cut.output  # from a window, all of whose copies the loop awaited
    assert told(tmp_path / "alone") == 1


def test_no_checkpoint_holds_weights_that_are_put_back(tmp_path: Path) -> None:
    config = {"checkpoint": {"interval_iterations": 5, "shared_memory": False}}
    alone, cut = alone_and_cut(noisy, tmp_path, at=18, kind="noise", data=True, config=config)
    assert cut.result == alone.result
    assert told(tmp_path / "alone") >= 1


def test_a_loop_that_leaves_its_weights_alone_is_not_slowed(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(noisy, tmp_path, at=13, kind="", data=True, config={})
    assert cut.result == alone.result
    assert told(tmp_path / "alone") == 0
