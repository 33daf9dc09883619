"""Loops that a restart after SIGTERM does not bring back: it repeats two steps, which show it."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, Leaving, TorchAdapter
from cpsr.journal import JournalReader
from cpsr.life import leaving
from cpsr.ranks import group
from tests.situations.lives import Ended, Life, alone_and_cut, backward, digest, live

ROWS, BATCH, PASSES = 64, 8, 4
CUT_AT = 20  # in the third pass; the state is committed after the next step, and two further ones are trained
Batch = tuple[torch.Tensor, torch.Tensor]
Net = nn.Sequential


class Job:
    """What a loop of this file trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.data = TensorDataset(torch.randn(ROWS, 12), torch.randn(ROWS, 4))
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.loader = DataLoader(self.data, batch_size=BATCH, shuffle=True)

    def loss(self, batch: Batch) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


class Unlabelled(Job):
    """As FixMatch: batches of a second loader beside those of `resume`."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self._batches()

    def _batches(self) -> Iterator[torch.Tensor]:
        rows = TensorDataset(torch.arange(ROWS * 12, dtype=torch.float32).reshape(ROWS, 12) / 500)
        while True:
            for (x,) in DataLoader(rows, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)):
                yield x

    def loss(self, batch: Batch) -> torch.Tensor:
        on_unlabelled: torch.Tensor = self.net(next(self.second))
        return super().loss(batch) + on_unlabelled.square().mean()


def loop(life: Life) -> str:
    job = {"Job": Job, "Unlabelled": Unlabelled}[life.options["job"]]()
    adapter = TorchAdapter(job.net, job.optimizer)
    with CPSRRecovery(adapter, life.config()) as recovery:
        for _ in range(recovery.epoch, PASSES):
            for batch in recovery.resume(job.loader):
                loss = job.loss(batch)
                job.optimizer.zero_grad()
                backward(loss)
                job.optimizer.step()
                life.step(recovery.iteration)
    return digest(job.net)


def checks(folder: Path) -> list[tuple[str, int | None]]:
    with JournalReader(folder / "run" / "journal.db") as reader:
        return [(one.kind, one.iteration) for one in reader.events() if one.kind in ("checked", "not restored")]


def cut(folder: Path, **options: Any) -> tuple[Ended, Ended]:
    return alone_and_cut(loop, folder, at=CUT_AT, how=signal.SIGTERM, **options)


def test_a_loop_that_comes_back_repeats_two_steps(tmp_path: Path) -> None:
    alone, again = cut(tmp_path, job="Job")
    assert again.result == alone.result
    assert checks(tmp_path / "cut") == [("checked", CUT_AT + 3)]


def test_what_a_restart_does_not_bring_back_is_reported(tmp_path: Path) -> None:
    alone, again = cut(tmp_path, job="Unlabelled")
    assert again.result != alone.result
    assert checks(tmp_path / "cut") == [("not restored", CUT_AT + 2)]


def in_the_steps_to_compare(life: Life) -> str:
    """Something happens in the first of them, on the last rank."""
    leaving.COMPARED_SECONDS, group.NEXT_PASS_SECONDS = 4.0, 3.0  # what is waited for does not come
    torch.manual_seed(0)
    net: nn.Module = nn.Linear(12, 4)
    if life.ranks > 1:
        torch.distributed.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(ROWS * PASSES, 12))
    left = life.directory / "left.txt"
    with CPSRRecovery(TorchAdapter(net, optimizer), life.config()) as recovery:
        recovery.on_event(lambda event: note(left, event))
        for (x,) in recovery.resume(DataLoader(data, batch_size=BATCH), epochs=1):
            optimizer.zero_grad()
            backward(net(x).square().mean())
            try:
                optimizer.step()
            except BaseException:
                if life.options["event"] != "caught":
                    raise
            with left.open("a") as file:
                file.write(f"step {recovery.iteration}\n")
            if recovery.life.leaving.left and life.rank == life.ranks - 1:
                if life.options["event"] == "error":
                    raise ValueError("in a step to compare")
                if life.options["event"] == "break":
                    break
                if life.options["event"] == "hang":
                    time.sleep(60)
            life.step(recovery.iteration)
    return digest(net)


def note(path: Path, event: object) -> None:
    if isinstance(event, Leaving):
        with path.open("a") as file:
            file.write(f"leaving {event.iteration}\n")


@pytest.mark.parametrize(
    ("event", "ranks", "statuses"),
    [("caught", 1, [143]), ("hang", 1, [143]), ("error", 2, [1, 1]), ("break", 2, None)],
)
def test_whatever_happens_in_these_steps_the_job_ends_and_nothing_is_lost(
    event: str, ranks: int, statuses: list[int] | None, tmp_path: Path
) -> None:
    options = {"event": event}
    alone = live(in_the_steps_to_compare, Life(tmp_path / "alone", ranks=ranks, options=options))
    first = live(
        in_the_steps_to_compare,
        Life(tmp_path / "cut", CUT_AT, signal.SIGTERM, ranks=ranks, options=options),
        seconds=60,
    )
    assert statuses is None or list(first.statuses) == statuses
    said = (tmp_path / "cut" / "left.txt").read_text().splitlines()
    assert event != "caught" or said[-2:] == [f"leaving {CUT_AT + 1}", f"step {CUT_AT + 3}"]
    again = live(in_the_steps_to_compare, Life(tmp_path / "cut", ranks=ranks, number=1, options=options))
    assert again.results == alone.results
    assert [kind for kind, _ in checks(tmp_path / "cut")] == ["checked"] * ranks
