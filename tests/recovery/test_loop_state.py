"""Usual training loops: after a kill every loss is that of the run left alone, or CPSR reports what it cannot see."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.committed import keep_pace, wait_until_committed
from tests.device import DEVICE
from tests.situations.lives import Life, alone_and_cut, backward, digest, live

ITEMS, BATCH, FEATURES, WIDTH = 40, 4, 5, 8  # 10 batches a pass: a checkpoint at iteration 20 is one at its end
INTERVAL, ITERATIONS = 4, 25


class Net(nn.Module):
    """Returns its loss; the dropout makes random states matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


class Loop:
    """A usual loop that keeps nothing more; the others keep something, and change it where usual loops do."""

    argument = ""  # of `TorchAdapter`, for what is kept

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.kept = self.made()

    def made(self) -> Any:
        return None

    def forward(self, called: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = called(x, y)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        backward(loss)

    def step(self) -> None:
        self.optimizer.step()

    def after_step(self) -> None: ...
    def after_epoch(self) -> None: ...

    def ends_with(self) -> Any:
        return None


class Scaled(Loop):
    """The scale grows, and half precision makes it matter."""

    argument = "grad_scaler"

    def made(self) -> Any:
        return torch.amp.GradScaler(DEVICE, init_scale=2.0**12, growth_interval=3)

    def forward(self, called: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.float16):
            return super().forward(called, x, y)

    def backward(self, loss: torch.Tensor) -> None:
        backward(self.kept.scale(loss))

    def step(self) -> None:
        self.kept.unscale_(self.optimizer)
        self.kept.step(self.optimizer)
        self.kept.update()

    def ends_with(self) -> Any:
        return self.kept.get_scale()


class Averaged(Loop):
    """torch's average of the weights."""

    def made(self) -> Any:
        return torch.optim.swa_utils.AveragedModel(
            self.module, use_buffers=True, avg_fn=lambda average, value, count: 0.9 * average + 0.1 * value
        )

    def after_step(self) -> None:
        self.kept.update_parameters(self.module)

    def ends_with(self) -> Any:
        return digest(self.kept)


class Drawing(Loop):
    """Random numbers drawn after steps and passes, as an evaluation that samples does."""

    def after_step(self) -> None:
        torch.rand(3, device=DEVICE)

    after_epoch = after_step


LOOPS = {
    "nothing": Loop,
    "scaler": Scaled,
    "average": Averaged,
    "draws": Drawing,
}


def training(life: Life) -> Any:
    """The losses of this life by iteration and micro-batch, and the end. Options, with their defaults::

        keeps="nothing"        what the loop keeps; a key of `LOOPS`
        given=""               how CPSR gets it: `adapter`, `register`, or not at all
        accumulate=1           micro-batches in a step
        adapter_accumulate=1   the same as given to `TorchAdapter`
        own_epochs=""          the loop over passes is the user's own, `from recovery.epoch` or `from 0`; or CPSR's
        sampler=False          a DistributedSampler, whose pass the loop sets
        committed=0            a checkpoint that is awaited before this life is cut
        mode="exact"           CPSR's

    A life is cut before so many of its micro-batches.
    """
    options = life.options
    accumulate = options.get("accumulate", 1)
    torch.manual_seed(7)
    module = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-2)
    kind, given = LOOPS[options.get("keeps", "nothing")], options.get("given")
    loop = kind(module, optimizer)
    more = {kind.argument: loop.kept} if given == "adapter" else {}
    loader = data(distributed=options.get("sampler", False))
    steps = options.get("adapter_accumulate", 1)
    adapter = TorchAdapter(module, optimizer, **more, micro_batches_per_iteration=steps)
    checkpoint = {"interval_iterations": INTERVAL, "shared_memory": False}
    config = life.config(mode=options.get("mode", "exact"), checkpoint=checkpoint)
    losses: list[Any] = []
    with CPSRRecovery(adapter, config) as recovery:
        if given == "register":
            recovery.register("kept", loop.kept)
        for dealt, (x, y) in enumerate(passes(recovery, loop, loader, options)):
            if dealt == life.at > 0:
                if options.get("committed"):
                    wait_until_committed(life.directory / "run", options["committed"])
                life.step(dealt)
            last = (dealt + 1) % accumulate == 0
            loss = loop.forward(module, x.to(DEVICE), y.to(DEVICE))
            loop.backward(loss / accumulate)
            losses.append([recovery.iteration, (dealt + 1) % accumulate, float(loss).hex()])
            if not last:
                continue
            loop.step()
            optimizer.zero_grad()
            loop.after_step()
            keep_pace(recovery)
            if recovery.iteration >= ITERATIONS:
                break
    return [losses, digest(module), loop.ends_with()]


def passes(recovery: CPSRRecovery, loop: Loop, loader: Any, options: dict[str, Any]) -> Iterator[Any]:
    """All batches of the run; what belongs between two passes is done there."""
    if not (own_epochs := options.get("own_epochs")):
        yield from recovery.resume(loader, repeat=True)
    for epoch in range(0 if own_epochs == "from 0" else recovery.epoch, 100):
        if options.get("sampler"):
            loader.sampler.set_epoch(epoch)
        yield from recovery.resume(loader)
        loop.after_epoch()


def data(*, distributed: bool) -> Any:
    x = torch.randn(ITEMS, FEATURES)
    items = TensorDataset(x, x.sum(1, keepdim=True))
    if not distributed:
        return DataLoader(items, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
    parts: DistributedSampler[Any] = DistributedSampler(items, num_replicas=1, rank=0, seed=3)
    return DataLoader(items, batch_size=BATCH, sampler=parts, drop_last=True)


OWN = "from recovery.epoch"
AT_THE_END_OF_A_PASS: dict[str, Any] = {"at": 23, "committed": 20, "own_epochs": OWN}
CASES: dict[str, dict[str, Any]] = {
    "scaler": {"given": "adapter"},
    "average": {"given": "register"},
    "draws": AT_THE_END_OF_A_PASS,
    "nothing, in the middle of an accumulation": {"at": 40, "accumulate": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_every_loss_is_that_of_the_run_left_alone(tmp_path: Path, case: str) -> None:
    options = {"keeps": case.partition(",")[0], "at": 14, "committed": 12, **CASES[case]}
    alone, back = alone_and_cut(training, tmp_path, **options)
    for (expected, *end), (losses, *same) in zip(alone.results, back.results, strict=True):
        assert losses[0][0] >= options["committed"]
        assert losses == expected[-len(losses) :]
        assert same == end


def test_in_other_modes_it_is_reported_once_and_the_advice_can_be_followed(tmp_path: Path) -> None:
    options = {"keeps": "scaler", "accumulate": 2, "mode": "auto", "committed": 4}
    ended = live(training, Life(tmp_path, 20, options=options))
    assert ended.output.count("The GradScaler that scales the loss was not given to CPSR") == 1
    assert "micro_batches_per_iteration=2)" in ended.output
    better = live(training, Life(tmp_path, number=1, options=options | {"given": "adapter", "adapter_accumulate": 2}))
    assert better.result
    assert "the saved run had no grad_scaler" in better.output
    assert "was not given" not in better.output
    assert "micro_batches_per_iteration=" not in better.output


def test_a_loop_over_passes_that_begins_anew_is_reported(tmp_path: Path) -> None:
    options = {"own_epochs": "from 0", "sampler": True, "committed": 12}
    live(training, Life(tmp_path, 17, options=options))
    again = live(training, Life(tmp_path, number=1, options=options))
    assert "for epoch in range(recovery.epoch, epochs)" in again.output
