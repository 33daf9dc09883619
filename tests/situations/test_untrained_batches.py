"""Batches that the loop has drawn and not trained when its state is saved: they come again after a restart."""

import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, alone_and_cut, backward, digest, live

STEPS = 20
ROWS = torch.arange(160.0)[:, None].expand(160, 8) / 160


def with_dropout() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 8))


def drawn() -> torch.Tensor:
    """A batch from the global generators of torch, NumPy and Python."""
    rows = ROWS[torch.randint(160, (8,))]
    return rows + 0.1 * random.random() + torch.from_numpy(numpy.random.randn(8, 1)).float()


def one_after_another() -> Iterator[torch.Tensor]:
    while True:
        yield drawn()


class Noisy(Dataset[torch.Tensor]):
    """Draws with the global generators when a row is read."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index] + 0.1 * torch.rand(8) + 0.1 * random.random()


class FetchesAhead:
    """As timm's PrefetchLoader: it has the next batch, and has drawn for it, while the loop trains on this one."""

    def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
        self.loader, self.noise = loader, 0.1

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[torch.Tensor]:
        held = None
        for batch in self.loader:
            following = batch + self.noise * (torch.rand(8) + random.random())
            if held is not None:
                yield held
            held = following
        if held is not None:
            yield held


SOURCES: dict[str, Callable[[], Any]] = {
    "generator": one_after_another,
    "function": lambda: drawn,
    "loader": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
    "ahead": lambda: FetchesAhead(DataLoader(Noisy(), batch_size=16, shuffle=True)),
    "ahead, workers": lambda: FetchesAhead(
        DataLoader(Noisy(), batch_size=16, shuffle=True, num_workers=1, persistent_workers=True)
    ),
    "workers": lambda: DataLoader(TensorDataset(ROWS), batch_size=8, shuffle=True, num_workers=1),
}


def inputs(batch: Any) -> torch.Tensor:
    found: torch.Tensor = batch[0] if isinstance(batch, list) else batch
    return found


def start(life: Life) -> tuple[Any, ...]:
    multiprocessing.current_process().daemon = False  # it has workers
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = with_dropout()
    if life.ranks > 1:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, SOURCES[life.options["source"]]()


def drawn_after_the_forward(life: Life) -> Any:
    """As nanoGPT does it: the next batch is drawn while the device computes; the evaluation draws, too."""
    model, optimizer, source = start(life)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        batches = recovery.resume(source, repeat=life.options["source"] in ("loader", "workers"))
        batch = inputs(next(batches))
        while True:
            if recovery.iteration % 5 == 0:
                drawn()
            for _ in range(life.options.get("accumulates", 1)):
                loss = (model(batch) - batch).square().mean()
                batch = inputs(next(batches))
                backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            life.step(recovery.iteration)
            if recovery.iteration >= STEPS:
                break
    return [loss.item(), digest(model)]


def drawn_before_the_forward(life: Life) -> Any:
    model, optimizer, source = start(life)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        batches = recovery.resume(source, repeat=life.options["source"] in ("loader", "workers"))
        held = [inputs(next(batches)) for _ in range(life.options.get("depth", 1))]
        while recovery.iteration < STEPS:
            held.append(inputs(next(batches)))
            batch = held.pop(0)
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            life.step(recovery.iteration)
    return [loss.item(), digest(model)]


def in_a_plain_loop(life: Life) -> Any:
    model, optimizer, source = start(life)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        for drawn_now in recovery.resume(source, repeat=life.options["source"] in ("loader", "workers")):
            if recovery.iteration >= life.options.get("stop", STEPS):
                break
            batch = inputs(drawn_now)
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            life.step(recovery.iteration)
    return [loss.item(), digest(model)]


@pytest.mark.parametrize("source", ["generator", "loader", "workers"])
def test_batches_drawn_after_the_forward(source: str, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(drawn_after_the_forward, tmp_path, at=13, source=source)
    assert cut.result == alone.result


def test_batches_drawn_after_the_forward_of_several(tmp_path: Path) -> None:
    options: dict[str, Any] = {"source": "function", "accumulates": 3}
    alone, cut = alone_and_cut(drawn_after_the_forward, tmp_path, at=13, how=signal.SIGTERM, **options)
    assert cut.result == alone.result


@pytest.mark.parametrize(("source", "depth", "how"), [("generator", 1, signal.SIGTERM), ("workers", 3, signal.SIGKILL)])
def test_batches_drawn_before_the_forward(source: str, depth: int, how: signal.Signals, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(drawn_before_the_forward, tmp_path, at=13, how=how, source=source, depth=depth)
    assert cut.result == alone.result


def in_passes(life: Life) -> Any:
    """Ten batches in each of two passes; the second has less noise, as timm turns its mixup off."""
    model, optimizer, source = start(life)
    noises, losses = [], []
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        for number in range(recovery.epoch, 2):
            stream = recovery.resume(source)
            stream.noise = 0.1 / (1 + number)
            noises.append(source.noise)
            for batch in stream:
                loss = (model(batch) - batch).square().mean()
                optimizer.zero_grad()
                backward(loss)
                optimizer.step()
                losses.append(loss.item())
                life.step(recovery.iteration)
    return [losses, digest(model), noises[-1]]


@pytest.mark.parametrize("source", ["ahead", "ahead, workers"])
@pytest.mark.parametrize("at", [8, 18])
def test_batches_that_the_loader_itself_fetches_ahead(source: str, at: int, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(in_passes, tmp_path, at=at, source=source)
    (losses, *expected), (again, *trained) = alone.result, cut.result
    assert len(again) < len(losses) == 20
    assert again == losses[-len(again) :]
    assert trained == expected
    assert expected[-1] == 0.05


def test_a_loop_that_draws_a_batch_and_leaves(tmp_path: Path) -> None:
    source, ranks = "loader", 2
    alone = live(in_a_plain_loop, Life(tmp_path / "alone", ranks=ranks, options={"source": source}))
    for number, stop in enumerate((7, 10, 16, STEPS)):
        options = {"source": source, "stop": stop}
        again = live(in_a_plain_loop, Life(tmp_path / "cut", ranks=ranks, number=number, options=options))
    assert again.results == alone.results
    assert None not in alone.results
