"""One rank of a plain torch loop that trains adapters beside frozen weights, and can kill itself at a chosen step."""

import hashlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.device import DEVICE
from tests.recovery.options import LifeOptions

FEATURES, RANK = 32, 2
WAIT_SECONDS = 60.0
MOVING = 0.9  # share of itself that the teacher keeps in a step


@dataclass(frozen=True)
class Options(LifeOptions):
    """What one life of the job does.

    Attributes:
        base_seed: of the base weights that the script loads.
        teacher: whether a part of the module outside the optimizer follows the trained weights in every step.
        merge_at: after this step the adapters are merged into the base weights, and begin at zero again.
        merge_through_data: by `.data`, of which torch counts no version.
        fault: after which step of the run this rank kills itself; 0: never.
        failing_rank: which one.
        committed: a commit record that must exist before.
    """

    base_seed: int = 3
    teacher: bool = False
    merge_at: int = 0
    merge_through_data: bool = False
    fault: int = 0
    failing_rank: int = 0
    committed: Path | None = None


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two narrow ones beside it (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, FEATURES) / FEATURES)
        self.up = nn.Parameter(torch.zeros(FEATURES, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return adapted

    def merge(self, *, through_data: bool) -> None:
        """Add the product to the frozen layer, and begin with nothing beside it."""
        with torch.no_grad():
            if through_data:
                self.base.weight.data += self.up @ self.down
            else:
                self.base.weight += self.up @ self.down
            self.up.zero_()


class Net(nn.Module):
    """Three such layers, the last on the base of the first; a mean of the inputs as a buffer."""

    def __init__(self, *, teacher: bool) -> None:
        super().__init__()
        self.adapted = [Adapted(), Adapted(), Adapted()]
        self.layers = nn.ModuleList(self.adapted)
        self.adapted[2].base = self.adapted[0].base
        self.teacher = nn.Linear(FEATURES, RANK, bias=False).requires_grad_(False) if teacher else None
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0))
        hidden = x
        for layer in self.adapted:
            hidden = torch.tanh(layer(hidden))
        loss = nn.functional.mse_loss(hidden, y)
        return loss if self.teacher is None else loss + self.teacher(hidden).square().mean()

    def follow(self) -> None:
        """Move the teacher towards the trained weights."""
        if self.teacher is not None:
            with torch.no_grad():
                self.teacher.weight.mul_(MOVING).add_(self.adapted[0].down, alpha=1 - MOVING)


def main(options: Options, rank: int, ranks: int) -> None:
    if ranks > 1:
        meeting = options.meeting
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.manual_seed(options.base_seed)
    module = Net(teacher=options.teacher).to(DEVICE)
    torch.manual_seed(11)
    with torch.no_grad():
        for layer in module.adapted:
            layer.down.normal_(std=0.2)
    called = nn.parallel.DistributedDataParallel(module) if ranks > 1 else module
    optimizer = torch.optim.AdamW([one for one in module.parameters() if one.requires_grad], lr=1e-2)
    values = torch.Generator().manual_seed(5 + rank)
    items = TensorDataset(*(torch.randn(40, FEATURES, generator=values) for _ in range(2)))
    ended: dict[str, Any] = {"losses": {}}
    with CPSRRecovery(TorchAdapter(called, optimizer), options.config) as recovery:
        ended["started"] = recovery.iteration
        train(recovery, called, module, optimizer, DataLoader(items, batch_size=4, shuffle=True), options, ended, rank)
    ended["state"] = digest(module.state_dict().values())
    options.leave(rank, ended)


def train(
    recovery: CPSRRecovery,
    called: nn.Module,
    module: Net,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    options: Options,
    ended: dict[str, Any],
    rank: int,
) -> None:
    for x, y in recovery.resume(loader, epochs=100):
        loss = called(x.to(DEVICE), y.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The state of the step before is durable by now, however busy the machine is.
        recovery.life.saver.drain(WAIT_SECONDS)
        recovery.life.saver.pool.settle()
        module.follow()
        if recovery.iteration == options.merge_at:
            for layer in module.adapted[:2]:
                layer.merge(through_data=options.merge_through_data)
        ended["losses"][recovery.iteration] = loss.detach().item()
        if recovery.iteration == options.fault and rank == options.failing_rank:
            leave(options.committed)
        if recovery.iteration == options.iterations:
            break


def leave(committed: Path | None) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while committed is not None and not committed.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Hash of all bytes."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()
