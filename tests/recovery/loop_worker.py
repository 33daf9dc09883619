"""One rank of a plain torch loop with one more thing that usual loops keep, which can kill itself at a chosen point.

Every loss is written down when it is known, so that lives that end early can be compared, too.
"""

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.device import DEVICE
from tests.recovery.options import LifeOptions

ITEMS, BATCH, FEATURES, WIDTH = 40, 4, 5, 8


@dataclass(frozen=True)
class Options(LifeOptions):
    """What one life of the job does.

    Attributes:
        keeps: what the loop keeps; a key of `LOOPS`.
        given: how CPSR gets it: `adapter`, `register`, or not at all.
        accumulate: micro-batches in a step.
        adapter_accumulate: the same as given to `TorchAdapter`.
        late: what the loop keeps is made when the state is restored already.
        own_epochs: the loop over passes is the user's own, `from recovery.epoch` or `from 0` each time; or CPSR's.
        sampler: `sets epoch` and `keeps epoch` (each with a DistributedSampler), or none.
        fault: `micro-batch:signal`: before which of this life's rank 0 gets the signal.
        committed: a commit record that must exist before.
    """

    keeps: str = "nothing"
    given: str = ""
    accumulate: int = 1
    adapter_accumulate: int = 1
    late: bool = False
    own_epochs: str = ""
    sampler: str = ""
    fault: str = ""
    committed: Path | None = None


class Net(nn.Module):
    """Returns its loss; the dropout makes random states matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Loop:
    """A usual loop that keeps nothing more; the others keep something, and change it where usual loops do."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.kept: Any = None

    def parts(self, given: str) -> dict[str, Any]:
        """Keyword arguments of `TorchAdapter`."""
        return {}

    def forward(self, called: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = called(x, y)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch

    def step(self) -> None:
        self.optimizer.step()

    def after_step(self) -> None:
        pass

    def after_epoch(self) -> None:
        pass

    def ends_with(self) -> Any:
        return None


class Scaled(Loop):
    """The scale grows, and half precision makes it matter."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, growth_interval=3)

    def parts(self, given: str) -> dict[str, Any]:
        return {"grad_scaler": self.kept} if given == "adapter" else {}

    def forward(self, called: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.float16):
            return super().forward(called, x, y)

    def backward(self, loss: torch.Tensor) -> None:
        self.kept.scale(loss).backward()

    def step(self) -> None:
        self.kept.unscale_(self.optimizer)
        self.kept.step(self.optimizer)
        self.kept.update()

    def ends_with(self) -> Any:
        return self.kept.get_scale()


class ScaledWhole(Scaled):
    """The scaler's own step, without unscaling before it; a scale that overflows, so that steps are skipped."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept = OwnScaler(DEVICE, init_scale=2.0**18, growth_interval=3)

    def step(self) -> None:
        self.kept.step(self.optimizer)
        self.kept.update()


class OwnScaler(torch.amp.GradScaler):
    """A user's subclass."""


class Scheduled(Loop):
    """A schedule by the step."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

    def parts(self, given: str) -> dict[str, Any]:
        return {"scheduler": self.kept} if given == "adapter" else {}

    def after_step(self) -> None:
        self.kept.step()


class ScheduledInParts(Scheduled):
    """A warm-up and what follows, in one schedule."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        schedulers = torch.optim.lr_scheduler
        parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.ExponentialLR(optimizer, 0.95)]
        self.kept = schedulers.SequentialLR(optimizer, parts, milestones=[5])


class ScheduledByEpoch(Loop):
    """A schedule by the pass."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def after_epoch(self) -> None:
        self.kept.step()


class OnPlateau(Loop):
    """A schedule by a metric; it is no step of its own that torch counts."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)

    def after_epoch(self) -> None:
        with torch.no_grad():
            self.module.eval()
            self.kept.step(self.module(torch.ones(4, FEATURES, device=DEVICE), torch.ones(4, 1, device=DEVICE)))
            self.module.train()


class Averaged(Loop):
    """torch's average of the weights."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept = torch.optim.swa_utils.AveragedModel(
            module, use_buffers=True, avg_fn=lambda average, value, count: 0.9 * average + 0.1 * value
        )

    def after_step(self) -> None:
        self.kept.update_parameters(self.module)

    def ends_with(self) -> Any:
        return digest(self.kept.state_dict().values())


class Counting(Loop):
    """Early stopping, a metric and a schedule of the user's own, which depend on each other."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept = {"best": float("inf"), "bad_epochs": 0, "seen": 0}

    def after_step(self) -> None:
        self.kept["seen"] += 1

    def after_epoch(self) -> None:
        loss = float(sum(value.detach().abs().sum() for value in self.module.parameters()))
        self.kept["bad_epochs"] = 0 if loss < self.kept["best"] else self.kept["bad_epochs"] + 1
        self.kept["best"] = min(loss, self.kept["best"])

    def ends_with(self) -> Any:
        return dict(self.kept)


class Noisy(Loop):
    """Noise on the inputs from a generator of the user's own."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self.kept = torch.Generator().manual_seed(5)

    def noise(self) -> float:
        return float(torch.randn((), generator=self.kept))

    def forward(self, called: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(called, x + 0.1 * self.noise(), y)


class Drawing(Loop):
    """Random numbers drawn after steps and passes, as an evaluation that samples does."""

    def after_step(self) -> None:
        torch.rand(3, device=DEVICE)

    def after_epoch(self) -> None:
        torch.rand(3, device=DEVICE)


LOOPS = {
    "nothing": Loop,
    "scaler": Scaled,
    "scaler that overflows": ScaledWhole,
    "schedule": Scheduled,
    "schedule in parts": ScheduledInParts,
    "schedule by epoch": ScheduledByEpoch,
    "schedule by metric": OnPlateau,
    "average": Averaged,
    "counters": Counting,
    "generator": Noisy,
    "draws": Drawing,
}


def main(options: Options, rank: int, ranks: int) -> None:
    if ranks > 1:
        meeting = options.meeting
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    torch.manual_seed(7)
    module = Net().to(DEVICE)
    called = nn.parallel.DistributedDataParallel(module) if ranks > 1 else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
    loop = None if options.late else LOOPS[options.keeps](module, optimizer)
    loader = data(options, rank, ranks)
    adapter = TorchAdapter(
        called,
        optimizer,
        **({} if loop is None else loop.parts(options.given)),
        micro_batches_per_iteration=options.adapter_accumulate,
    )
    with CPSRRecovery(adapter, options.config) as recovery:
        loop = LOOPS[options.keeps](module, optimizer) if loop is None else loop
        if options.given == "register":
            recovery.register("kept", loop.kept)
        train(recovery, called, loop, loader, options, rank, ranks)
    ended = {"state": digest(module.state_dict().values()), "kept": loop.ends_with()}
    options.leave(rank, ended)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def data(options: Options, rank: int, ranks: int) -> "DataLoader[Any]":
    x = torch.randn(ITEMS * ranks, FEATURES)
    items = TensorDataset(x, x.sum(1, keepdim=True))
    if not options.sampler:
        return DataLoader(items, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    sampler: DistributedSampler[Any] = DistributedSampler(items, num_replicas=ranks, rank=rank, seed=3)
    return DataLoader(items, batch_size=BATCH, sampler=sampler, drop_last=True)


def passes(recovery: CPSRRecovery, loop: Loop, loader: Any, options: Options) -> Iterator[Any]:
    """All batches of the run; what belongs between two passes is done there."""
    if not options.own_epochs:
        yield from recovery.resume(loader, repeat=True)
    for epoch in range(0 if options.own_epochs == "from 0" else recovery.epoch, 100):
        if options.sampler == "sets epoch":
            loader.sampler.set_epoch(epoch)
        yield from recovery.resume(loader)
        loop.after_epoch()


def train(
    recovery: CPSRRecovery, called: nn.Module, loop: Loop, loader: Any, options: Options, rank: int, ranks: int
) -> None:
    with options.result.with_suffix(f".{rank}.losses").open("w") as losses:
        dealt = 0
        for x, y in passes(recovery, loop, loader, options):
            fail(options, dealt, rank)
            dealt += 1
            last = dealt % options.accumulate == 0
            with nullcontext() if last else waiting(called):
                loss = loop.forward(called, x.to(DEVICE), y.to(DEVICE))
                loop.backward(loss / options.accumulate)
            losses.write(json.dumps([recovery.iteration, dealt % options.accumulate, float(loss).hex()]) + "\n")
            losses.flush()
            if not last:
                continue
            loop.step()
            loop.optimizer.zero_grad()
            loop.after_step()
            if recovery.life.saver.is_due(recovery.iteration + 1):  # steps this short would outrun the disk
                recovery.life.saver.drain(10.0)
            if recovery.iteration >= options.iterations:
                return


def waiting(called: nn.Module) -> AbstractContextManager[Any]:
    if isinstance(called, nn.parallel.DistributedDataParallel):
        unsynchronized: AbstractContextManager[Any] = called.no_sync()
        return unsynchronized
    return nullcontext()


def fail(options: Options, dealt: int, rank: int) -> None:
    at, _, number = options.fault.partition(":")
    if rank != 0 or str(dealt) != at:
        return
    deadline = time.monotonic() + 30
    while options.committed is not None and not options.committed.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(os.getpid(), getattr(signal, number))


def digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
