"""Ranks that leave their loops at different steps: no rank waits for another without end, and the error says why."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from cpsr.errors import UnevenRanksError
from cpsr.ranks import group
from tests.situations.lives import Life, backward, digest, live

STEPS = 12
LONG = 2.5  # seconds; the others look once a second


class CaughtError(Exception):
    """An error that a rank catches outside of its block, and lives on."""


def loop(life: Life) -> Any:  # noqa: C901 - a script with all of its ways to leave
    """Rank 0 leaves its loop after `STEPS`, the others after twice as many, in the way of `life.options`."""
    dist.init_process_group("gloo")
    group.NEXT_PASS_SECONDS = LONG
    how, leaves = life.options["how"], life.rank == 0
    even = how == "evaluates"
    torch.manual_seed(life.rank)
    rows = torch.randn(8 * STEPS * (1 if leaves or even else 2), 8)
    loader = DataLoader(TensorDataset(rows), batch_size=8)
    model: nn.Module = nn.Linear(8, 8)
    if how == "joins":
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(batch: torch.Tensor) -> None:
        loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()

    def evaluate() -> None:
        if leaves and how == "evaluates":
            time.sleep(LONG)

    caught = ""
    try:
        with CPSRRecovery(TorchAdapter(model, optimizer), life.config()) as recovery:
            if how == "joins":
                with Join([model]):  # type: ignore[list-item]
                    for (batch,) in recovery.resume(loader, epochs=1):
                        train(batch)
            else:
                for _ in range(2 if even else 1):
                    for (batch,) in recovery.resume(loader):
                        train(batch)
                        if recovery.iteration % 10 == 0:
                            evaluate()
                        if leaves and recovery.iteration == STEPS - 3 and how == "breaks":
                            break
                        if leaves and recovery.iteration == STEPS - 3 and how == "raises":
                            raise CaughtError
                    evaluate()
    except (CaughtError, UnevenRanksError) as error:
        caught = f"{type(error).__name__}: {error}"
        if how == "raises":
            time.sleep(3 * LONG)  # its process lives on
    return [caught, recovery.iteration, digest(model)]


@pytest.mark.parametrize("how", ["breaks", "raises", "joins"])
def test_the_ranks_that_train_on_are_told_which_one_has_left(how: str, tmp_path: Path) -> None:
    ended = live(loop, Life(tmp_path, ranks=2, options={"how": how}))
    if ended.results[0] is None:  # has noticed first that the process of rank 1 has ended
        assert "Connection closed by peer" in ended.output
    else:
        assert ended.results[0][0].startswith(
            "CaughtError" if how == "raises" else "UnevenRanksError: rank 1 has left its"
        )
    caught, iteration, _ = ended.results[1]
    last = STEPS if how == "joins" else STEPS - 3
    assert caught.startswith("UnevenRanksError: rank 0 has "), ended.output
    assert f"after iteration {last}" in caught
    assert last < iteration <= 2 * STEPS


def test_an_evaluation_on_one_rank_keeps_the_others_waiting(tmp_path: Path) -> None:
    ended = live(loop, Life(tmp_path, ranks=2, options={"how": "evaluates"}))
    assert [result[:2] for result in ended.results] == [["", 2 * STEPS]] * 2
