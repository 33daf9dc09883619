"""Loops that change weights, buffers and teachers after the optimizer's step: every saved state has these changes."""

import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, alone_and_cut, backward, digest

FEATURES, WIDTH, BATCH, STEPS = 12, 6, 8, 24
Batch = tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """A model with a teacher, a bank of features and batch statistics, none of them trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.BatchNorm1d(WIDTH))
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.bank: torch.Tensor
        self.register_buffer("bank", torch.zeros(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        likeness = (y @ self.bank.t()).square().mean()
        loss: torch.Tensor = nn.functional.mse_loss(y, self.teacher(x)) + 0.1 * likeness
        return loss


def clips(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for parameter in net.layers.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def follows(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    for slow, fast in zip(net.teacher.parameters(), net.layers.parameters(), strict=True):
        slow.lerp_(fast, 0.1)


def remembers(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    net.bank.copy_(torch.cat([net.bank[len(x) :], net.layers(x)]))


def looks_ahead(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """As Lookahead and Schedule-Free: weights, moments and the learning rate are written outside of the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.97
        for parameter in group["params"]:
            parameter.mul_(0.99)
            if "exp_avg" in optimizer.state[parameter]:
                optimizer.state[parameter]["exp_avg"].mul_(0.9)


Change = Callable[[Net, torch.optim.Optimizer, torch.Tensor], None]
CHANGES: dict[str, Change] = {one.__name__: one for one in (clips, follows, remembers, looks_ahead)}


def loop(life: Life) -> Any:
    """One loop, with the settings of `life.options`."""
    torch.manual_seed(0)
    change, where = CHANGES[life.options["change"]], life.options.get("where", "resume")
    rows = TensorDataset(torch.randn(64, FEATURES))
    loader: Any = DataLoader(rows, batch_size=BATCH, shuffle=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.layers.parameters(), lr=1e-2)
    config = life.config(memory={"interval_iterations": life.options.get("memory", 3)})
    with CPSRRecovery(TorchAdapter(net, optimizer), config) as recovery:

        def train(x: torch.Tensor) -> None:
            loss = net(x)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()

        def after(x: torch.Tensor) -> None:
            with torch.no_grad():
                change(net, optimizer, x)

        if where == "none":  # batches are drawn from torch's own generator
            while recovery.iteration < STEPS:
                x = torch.randn(BATCH, FEATURES)
                train(x)
                after(x)
                life.step(recovery.iteration)
            return digest(net)
        for _ in range(recovery.epoch, 3):
            for (x,) in recovery.resume(loader):
                train(x)
                if where == "resume":
                    after(x)
                life.step(recovery.iteration)
            if where != "resume":  # between two passes
                after(rows[:BATCH][0])
                update_bn([rows[:BATCH][0]], net.layers)
    return digest(net)


@pytest.mark.parametrize(
    ("change", "how"), [("clips", signal.SIGKILL), ("follows", signal.SIGTERM), ("remembers", signal.SIGKILL)]
)
def test_after_each_step(change: str, how: signal.Signals, tmp_path: Path) -> None:
    alone, cut = alone_and_cut(loop, tmp_path, at=13, how=how, change=change)
    assert cut.result == alone.result


def test_between_two_passes(tmp_path: Path) -> None:
    """The last step of a pass is the eighth, after which the memory takes a snapshot."""
    alone, cut = alone_and_cut(loop, tmp_path, at=11, change="clips", where="between", memory=4)
    assert cut.result == alone.result


def test_in_a_loop_that_draws_its_batches_itself(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(loop, tmp_path, at=13, how=signal.SIGTERM, change="looks_ahead", where="none")
    assert cut.result == alone.result
