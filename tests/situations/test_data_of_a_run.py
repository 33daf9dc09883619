"""What decides the batches beside global random states: own generators, lengths, rows, streams, several steps."""

import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, alone_and_cut, backward, digest, live

ROWS = torch.arange(192.0)[:, None].expand(192, 8) / 192


class Buckets:
    """Batches in an order of its own, drawn from a generator of Python in a nested object."""

    def __init__(self) -> None:
        self.settings = {"random": random.Random(3)}

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(range(192))
        self.settings["random"].shuffle(rows)
        return (rows[first : first + 8] for first in range(0, 192, 8))


class Weighted(Sampler[int]):
    """Draws each row when it is asked for, from NumPy."""

    def __init__(self) -> None:
        self.generator = numpy.random.RandomState(5)

    def __len__(self) -> int:
        return 192

    def __iter__(self) -> Iterator[int]:
        for _ in range(192):
            yield int(self.generator.randint(192))


class Augmented(Dataset[torch.Tensor]):
    """Draws from a generator of its own when a row is read."""

    def __init__(self) -> None:
        self.noise = numpy.random.default_rng(7)

    def __len__(self) -> int:
        return 192

    def __getitem__(self, index: int) -> torch.Tensor:
        return ROWS[index] + 0.1 * float(self.noise.random())


class Growing(Sampler[int]):
    """Each pass takes more of the rows."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 40 * (self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Texts(Dataset[torch.Tensor]):
    """Rows as a list of texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(len(self.texts[index])))


def drawing_function() -> Callable[[], torch.Tensor]:
    noise = random.Random(11)
    return lambda: ROWS[[noise.randrange(192) for _ in range(8)]]


def paired() -> Iterator[Any]:
    first = DataLoader(TensorDataset(ROWS), batch_size=8, shuffle=True)
    yield from zip(first, DataLoader(TensorDataset(1 - ROWS), batch_size=8, shuffle=True), strict=True)


LOADERS: dict[str, Callable[[], Any]] = {
    "batch sampler with Python's": lambda: DataLoader(TensorDataset(ROWS), batch_sampler=Buckets()),
    "sampler with NumPy's": lambda: DataLoader(TensorDataset(ROWS), batch_size=8, sampler=Weighted()),
    "sampler with NumPy's, and a worker": lambda: DataLoader(
        TensorDataset(ROWS), batch_size=8, sampler=Weighted(), num_workers=1
    ),
    "data set with NumPy's": lambda: DataLoader(Augmented(), batch_size=8, shuffle=True),
    "function with Python's": drawing_function,
    "growing": lambda: DataLoader(TensorDataset(ROWS), batch_size=8, sampler=Growing()),
    "pairs in a generator": paired,
}


def trained(life: Life, loader: Any, passes: int | None, *, own_passes: bool = False) -> Any:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config(**life.options.get("config", {}))) as recovery:
        streams = (recovery.resume(loader) for _ in range(recovery.epoch, passes or 1))
        for stream in streams if own_passes else (recovery.resume(loader, epochs=passes),):
            for batch in stream:
                tensors = [one[0] if isinstance(one, list) else one for one in batch]
                rows = batch if isinstance(batch, torch.Tensor) else tensors[0]
                for part in rows.chunk(life.options.get("steps", 1)):
                    loss = (
                        model(part) - tensors[-1][: len(part)] if len(tensors) == 2 else model(part) - part
                    ).square()
                    optimizer.zero_grad()
                    backward(loss.mean())
                    optimizer.step()
                    life.step(recovery.iteration)
                if recovery.iteration >= life.options.get("stop", 60):
                    break
    return [recovery.iteration, digest(model)]


def over_any_loader(life: Life) -> Any:
    torch.manual_seed(0)
    multiprocessing.current_process().daemon = False  # it has workers
    loader = LOADERS[life.options["loader"]]()
    passes = 3 if isinstance(loader, DataLoader) else None
    return trained(life, loader, passes, own_passes=life.options.get("own passes", False))


@pytest.mark.parametrize("loader", [name for name in LOADERS if name != "growing"])
def test_generators_of_its_own_continue(loader: str, tmp_path: Path) -> None:
    at = 17 if "pairs" in loader else 31
    alone, cut = alone_and_cut(over_any_loader, tmp_path, at=at, loader=loader)
    assert cut.result == alone.result


def test_passes_of_other_lengths(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(over_any_loader, tmp_path, at=23, loader="growing")
    assert cut.result == alone.result
    assert alone.result[0] == 30


@pytest.mark.parametrize(
    ("at", "how", "config"),
    [
        (15, signal.SIGTERM, {}),
        (22, signal.SIGKILL, {"memory": {"interval_iterations": 1}}),
        (22, signal.SIGKILL, {"replay": {"enabled": True, "window_iterations": 1}}),
        (23, signal.SIGKILL, {"replay": {"enabled": True, "window_iterations": 3}}),
    ],
)
def test_several_steps_on_one_batch(at: int, how: signal.Signals, config: dict[str, Any], tmp_path: Path) -> None:
    options: dict[str, Any] = {"loader": "batch sampler with Python's", "steps": 4, "config": config}
    alone, cut = alone_and_cut(over_any_loader, tmp_path, at=at, how=how, **options)
    assert cut.result == alone.result
    assert alone.result[0] >= 60


def data_that_changes(life: Life) -> Any:
    torch.manual_seed(0)
    rows, kind = torch.randn(300, 8), life.options["kind"] if life.number else "same"
    texts = ["x" * (index % 37) for index in range(160)]
    data: dict[str, Any] = {
        "same": TensorDataset(rows[:160]),
        "more": TensorDataset(rows[:166]),
        "other values": TensorDataset(rows[100:260]),
        "texts": Texts(texts),
        "texts in another order": Texts(texts[::-1]),
    }
    if life.options["kind"].startswith("texts") and not life.number:
        kind = "texts"
    return trained(life, DataLoader(data[kind], batch_size=8, shuffle=True, drop_last=True), 2)


@pytest.mark.parametrize("kind", ["more", "other values", "texts in another order", "texts"])
def test_other_data_are_refused_within_a_pass(kind: str, tmp_path: Path) -> None:
    life = Life(tmp_path, at=13, options={"kind": kind})
    live(data_that_changes, life)
    again = live(data_that_changes, Life(tmp_path, number=1, options={"kind": kind}))
    if kind == "texts":
        assert again.statuses == [0], again.output
    else:
        assert again.statuses == [1]
        assert "mode 'exact' has trained nothing" in again.output


def two_streams(life: Life) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = DataLoader(TensorDataset(ROWS), batch_size=8, shuffle=True)
    second = DataLoader(TensorDataset(1 - ROWS), batch_size=8, shuffle=True)
    with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
        for (one,), (two,) in zip(recovery.resume(first), recovery.resume(second), strict=True):
            backward((model(one) - two).square().mean())
            optimizer.step()


def test_two_open_streams_are_refused(tmp_path: Path) -> None:
    ended = live(two_streams, Life(tmp_path))
    assert ended.statuses == [1]
    assert "two streams are open" in ended.output


def passes_with_data_of_their_own(life: Life) -> str:
    """`resume` is called for each pass: with another shard of the data, or after the loop has changed its labels."""
    torch.manual_seed(0)
    rows = torch.randn(3, 64, 8)
    labels = {"labels": rows[0].clone()}
    module = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with CPSRRecovery(TorchAdapter(module, optimizer), life.config()) as recovery:
        if life.options["data"] == "registered labels":
            recovery.register("labels", labels)
        for epoch in range(recovery.epoch, 3):
            shard = rows[epoch] if life.options["data"] == "shards" else labels["labels"]
            loader = DataLoader(TensorDataset(rows[0], shard), batch_size=8, shuffle=True)
            for inputs, targets in recovery.resume(loader):
                optimizer.zero_grad()
                backward(torch.nn.functional.mse_loss(module(inputs), targets))
                optimizer.step()
                life.step(recovery.iteration)
            labels["labels"].mul_(0.5)
    return digest(module)


@pytest.mark.parametrize("data", ["shards", "registered labels"])
def test_each_pass_may_have_its_own_data(data: str, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(passes_with_data_of_their_own, tmp_path, at=11, how=signal.SIGTERM, data=data)
    assert cut.result == alone.result


def test_labels_that_the_loop_has_changed_and_nobody_saves_are_refused(tmp_path: Path) -> None:
    _, cut = alone_and_cut(passes_with_data_of_their_own, tmp_path, at=11, how=signal.SIGTERM, data="labels")
    assert cut.statuses == [1]
    assert "dataset.tensors[1] has other values than before" in cut.output
