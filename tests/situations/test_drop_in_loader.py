"""The stream in the place of the loader: its attributes, its length, its numbers within a pass, one stream for all."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, alone_and_cut, backward, digest

PASSES = 3


class Rows(IterableDataset[Any]):
    """88 rows, without a length."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.x


def made(kind: str) -> Any:
    x = torch.randn(88, 16)
    if kind == "without a length":
        return DataLoader(Rows(x), batch_size=8)
    if kind == "batch sampler":
        data = TensorDataset(x)
        return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 8, drop_last=False))
    return DataLoader(TensorDataset(x), batch_size=8, shuffle=True)


def error(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    (inputs,) = batch if isinstance(batch, list | tuple) else (batch,)
    loss: torch.Tensor = (model(inputs) - inputs[:, :4]).square().mean()
    return loss


def accumulates_by_number(life: Life) -> Any:
    """The last step of a pass is made whatever its accumulation has reached."""
    torch.manual_seed(0)
    loader = made(life.options["loader"])
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        for _ in range(recovery.epoch, PASSES):
            for number, batch in enumerate(recovery.resume(loader), start=recovery.batch):
                backward(error(model, batch) / 4)
                if (number + 1) % 4 == 0 or number + 1 == 11:
                    optimizer.step()
                    optimizer.zero_grad()
                    life.step(recovery.iteration)
    return [recovery.iteration, digest(model)]


def one_stream_for_all_passes(life: Life) -> Any:
    """The learning rate follows the number in the pass and the length of the stream."""
    torch.manual_seed(0)
    loader = made(life.options["loader"])
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        stream = recovery.resume(loader)
        for epoch in range(recovery.epoch, PASSES):
            for number, batch in enumerate(stream, start=recovery.batch):
                optimizer.param_groups[0]["lr"] = 1e-1 * (1 - (epoch + number / len(loader)) / PASSES)
                optimizer.zero_grad()
                backward(error(model, batch))
                optimizer.step()
                life.step(recovery.iteration)
                if number == life.options.get("leaves", -1):
                    break
    return [recovery.iteration, digest(model)]


@pytest.mark.parametrize(("loader", "how"), [("plain", signal.SIGTERM), ("without a length", signal.SIGKILL)])
def test_accumulation_by_the_number_of_a_batch(loader: str, how: signal.Signals, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(accumulates_by_number, tmp_path, at=8, how=how, loader=loader)
    assert cut.result == alone.result
    assert alone.result[0] == 3 * PASSES


@pytest.mark.parametrize(
    ("loader", "at", "more", "steps"), [("batch sampler", 22, {}, 33), ("plain", 19, {"leaves": 6}, 21)]
)
def test_one_stream_serves_all_passes(loader: str, at: int, more: dict[str, Any], steps: int, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(one_stream_for_all_passes, tmp_path, at=at, loader=loader, **more)
    assert cut.result == alone.result
    assert alone.result[0] == steps


def test_the_stream_has_all_that_the_loader_has(tmp_path: Path) -> None:
    model = torch.nn.Linear(16, 4)
    loader, unsized = made("batch sampler"), made("without a length")
    config = Life(tmp_path).config()
    with CPSRRecovery(TorchAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1)), config) as recovery:
        stream = recovery.resume(loader)
        assert len(stream) == len(loader) == 11
        names = ("dataset", "sampler", "batch_sampler", "batch_size", "num_workers", "collate_fn", "drop_last")
        assert all(getattr(stream, name) is getattr(loader, name) for name in names)
        with pytest.raises(AttributeError, match="no_such_attribute"):
            _ = stream.no_such_attribute
        with pytest.raises(TypeError):
            len(recovery.resume(unsized))
        assert len(list(recovery.resume(unsized))) == 11
