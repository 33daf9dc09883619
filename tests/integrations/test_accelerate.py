"""A loop over what `accelerator.prepare` returned: what comes back bit for bit after a failure, and what is refused."""

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from cpsr import CPSRRecovery, Restored, RolledBack
from cpsr.errors import UnsupportedEngineError
from tests.committed import wait_until_committed
from tests.integrations.lives import Stopped, killed_and_back

pytest.importorskip("accelerate")
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed

integration: Any = importlib.import_module("cpsr.integrations.accelerate")

PASSES, STEPS_IN_PASS = 4, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def train(
    run_dir: Path,
    fail_at: int | None = None,
    *,
    mode: str = "exact",
    scale: float = 1.0,
    seedable: bool = False,
    own_passes: bool = True,
    own_generator: bool = False,
    events: list[Any] | None = None,
) -> tuple[str, list[Any]]:
    """One life; returns the final state, and the losses with their steps that this life trained."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
    )
    set_seed(3)
    x = torch.randn(22, 4)
    model: Any = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PASSES * STEPS_IN_PASS)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(4)) if own_generator else None
    loader: Any = DataLoader(dataset, 2, shuffle=sampler is None, sampler=sampler)  # 11 batches
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    config = {
        "run_dir": str(run_dir),
        "mode": mode,
        "checkpoint": {"interval_iterations": 4, "shared_memory": False},
    }
    trained: list[Any] = []
    recovery = CPSRRecovery(integration.engine_of(accelerator, model, optimizer, scheduler), config)
    if events is not None:
        recovery.on_event(events.append)

    def step(batch: Any) -> None:
        with accelerator.accumulate(model):
            loss = model(batch[0], batch[1] * scale)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if fail_at is not None and recovery.iteration % 4 == 1 and recovery.iteration > 4:
            wait_until_committed(run_dir, recovery.iteration - 1)
        trained.append((recovery.iteration, loss.item(), scheduler.get_last_lr()))
        if recovery.iteration == fail_at:
            raise Stopped

    with recovery:
        if own_passes:
            for _ in range(recovery.epoch, PASSES):
                for batch in integration.resume(recovery, loader):
                    step(batch)
        else:
            for batch in integration.resume(recovery, loader, epochs=PASSES):
                step(batch)
    state = [*model.state_dict().values(), *(one["exp_avg"] for one in optimizer.state_dict()["state"].values())]
    return hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in state)).hexdigest(), trained


def fail(run_dir: Path, at: int, **options: Any) -> None:
    with pytest.raises(Stopped):
        train(run_dir, at, **options)


ORDERS: list[dict[str, Any]] = [{}, {"seedable": True}, {"own_generator": True}]
PLACES = [(True, 10), (False, 10), (True, 13), (False, 14)]
# Each order and each place once; the other pairs in the slow group.
PAIRS = [
    pytest.param(order, *place, marks=[] if n % len(ORDERS) == m else pytest.mark.slow)
    for n, place in enumerate(PLACES)
    for m, order in enumerate(ORDERS)
]


@pytest.mark.parametrize(("order", "own_passes", "at"), PAIRS)
def test_the_run_continues_bit_for_bit(tmp_path: Path, order: dict[str, Any], own_passes: bool, at: int) -> None:
    whole, trained = train(tmp_path / "whole", own_passes=own_passes, **order)
    assert len(trained) == PASSES * 11
    assert trained[-1][0] == PASSES * STEPS_IN_PASS
    fail(tmp_path / "run", at, own_passes=own_passes, **order)
    events: list[Any] = []
    again, rest = train(tmp_path / "run", own_passes=own_passes, events=events, **order)
    assert isinstance(events[0], Restored)
    assert events[0].iteration == at // 4 * 4
    assert again == whole
    assert rest == trained[-len(rest) :]
    assert len(rest) < len(trained)


def test_a_predicted_state_that_diverges(tmp_path: Path) -> None:
    """It is rolled back across the beginning of a pass, and every step is trained."""
    fail(tmp_path, 19, mode="predict")
    events: list[Any] = []
    _, trained = train(tmp_path, mode="predict", scale=1e3, own_passes=False, events=events)
    (back,) = (one for one in events if isinstance(one, RolledBack))
    assert (events[0].iteration, events[0].predicted, back.to_iteration) == (19, True, 16)
    assert trained[-1][0] == PASSES * STEPS_IN_PASS
    later = [iteration for iteration, _, _ in trained[trained.index(next(one for one in trained if one[0] == 16)) :]]
    assert sorted(set(later)) == list(range(16, 25))


def test_what_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters())

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([])

    with pytest.raises(UnsupportedEngineError, match="this AdamW was not prepared"):
        integration.engine_of(accelerator, module, optimizer)
    prepared = accelerator.prepare(optimizer)
    endless = accelerator.prepare(DataLoader(Endless()))
    with CPSRRecovery(integration.engine_of(accelerator, module, prepared), {"run_dir": str(tmp_path)}) as recovery:
        with pytest.raises(UnsupportedEngineError, match="was not prepared by accelerate"):
            integration.resume(recovery, DataLoader(TensorDataset(torch.zeros(1))))
        with pytest.raises(UnsupportedEngineError, match="the dataset Endless has no length"):
            integration.resume(recovery, endless)
        with pytest.raises(UnsupportedEngineError, match=r"cpsr\.integrations\.accelerate"):
            recovery.resume(endless)


@pytest.mark.parametrize("split", [False, True])
def test_a_scheduler_that_steps_for_each_rank_keeps_their_number(split: bool) -> None:
    dataloader_config = DataLoaderConfiguration(split_batches=split)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=dataloader_config)
    module = Net()
    adam = torch.optim.AdamW(module.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(adam, 8)
    model, optimizer = accelerator.prepare(module, adam)
    alone = integration.engine_of(accelerator, model, optimizer, schedule)
    scalars = alone.scalars()
    assert alone.resharded(scalars)["iteration"] == 0
    prepared = integration.engine_of(accelerator, model, optimizer, accelerator.prepare(schedule))
    if split:
        assert prepared.resharded(scalars)["iteration"] == 0
        return
    with pytest.raises(UnsupportedEngineError, match=r"step of a prepared scheduler for each rank.*sync_gradients"):
        prepared.resharded(scalars)


def test_the_example_is_killed_and_comes_back(tmp_path: Path) -> None:
    killed_and_back("accelerate_loop.py", tmp_path)
    ends = [torch.load(tmp_path / life / "final.pt") for life in ("whole", "killed")]
    assert ends[0]["losses"] == ends[1]["losses"]
    assert all(torch.equal(value, ends[1]["model"][name]) for name, value in ends[0]["model"].items())
