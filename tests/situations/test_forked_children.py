"""Processes that a loop forks: they end as they like, and the run of their parent goes on."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, backward, digest, live

SECONDS = 20.0  # for a child to end; the machine may be busy


class LeftError(Exception):
    """A child leaves the loop with it."""


def raises(train: Callable[[], None]) -> None:
    raise LeftError


def trains(train: Callable[[], None]) -> None:
    """Past a checkpoint and a vote."""
    for _ in range(7):
        train()
    sys.exit(3)


def is_terminated(train: Callable[[], None]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS)


WAYS = {"raises": raises, "trains": trains, "is terminated": is_terminated, "returns": None}


def loop(life: Life) -> Any:  # noqa: C901 - a script with all that its child may do
    """The loop forks at iteration 7 and waits for the child; returns also what became of that."""
    if life.ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(160, 8)
    loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parent, status = os.getpid(), None
    ends = WAYS[life.options["ends"]]

    def train(batch: torch.Tensor) -> None:
        loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()

    def in_child() -> None:
        if ends is not None:
            ends(lambda: train(x[:8]))

    try:
        with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
            for (batch,) in recovery.resume(loader, epochs=1):
                train(batch)
                if recovery.iteration != 7:
                    continue
                if life.options["by"] == "os.fork":
                    child = os.fork()
                    if child == 0:
                        in_child()
                        break  # out of the loop, and of the block
                    status = waited_for(child)
                else:
                    multiprocessing.current_process().daemon = False  # which may have no children
                    process = multiprocessing.get_context("fork").Process(target=in_child)
                    process.start()
                    process.join(SECONDS)
                    status = process.exitcode
                    process.kill()
    except LeftError:
        pass
    finally:
        if os.getpid() != parent and sys.exc_info()[0] is not SystemExit:
            os._exit(4)
    (run_directory,) = life.directory.glob("run")
    exits_noted = sorted(path.name for path in run_directory.glob("exits/*"))
    return [status, exits_noted, recovery.iteration, digest(model)]


def waited_for(child: int) -> int | None:
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    return None


@pytest.mark.parametrize(
    ("by", "ends", "status"),
    [
        ("os.fork", "raises", 4),
        ("os.fork", "trains", 3),
        ("os.fork", "is terminated", -signal.SIGTERM),
        ("os.fork", "returns", 4),
        ("multiprocessing", "raises", 1),
    ],
)
def test_a_child_ends_and_the_run_goes_on(by: str, ends: str, status: int, tmp_path: Path) -> None:
    ended = live(loop, Life(tmp_path, options={"by": by, "ends": ends}))
    assert ended.statuses == [0]
    found, noted, iteration, _ = ended.result
    assert (found, noted, iteration) == (status, [], 20)


def test_a_child_of_one_rank_of_two(tmp_path: Path) -> None:
    ended = live(loop, Life(tmp_path, ranks=2, options={"by": "os.fork", "ends": "trains"}))
    assert ended.statuses == [0, 0]
    assert [found[:3] for found in ended.results] == [[3, [], 20]] * 2
