"""Optimizers that the engine does not have: refused at their first step, whenever that is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from cpsr import CPSRRecovery, TorchAdapter
from tests.situations.lives import Life, alone_and_cut, backward, digest, live

WIDTH = 16
Other = Callable[[CPSRRecovery, nn.Module, torch.optim.Optimizer], None]


def second_phase() -> Other:
    made: list[torch.optim.Optimizer] = []

    def act(recovery: CPSRRecovery, module: nn.Module, _: torch.optim.Optimizer) -> None:
        if recovery.iteration == 8:
            made[:] = made or [torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)]
            made[0].step()

    return act


def discriminator() -> Other:
    other = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.Adam(other.parameters())

    def act(recovery: CPSRRecovery, module: nn.Module, _: torch.optim.Optimizer) -> None:
        if recovery.iteration >= 8:
            backward(other(torch.ones(WIDTH)).sum())
            optimizer.step()

    return act


def schedule_of_an_epoch() -> Other:
    made: list[Any] = []

    def act(recovery: CPSRRecovery, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        made[:] = made or [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
        if recovery.iteration == 8:
            made[0].step()

    return act


OTHERS: dict[str, Callable[[], Other]] = {
    "SGD steps, an optimizer of parameters of the same module that CPSR does not follow": second_phase,
    "Adam steps, an optimizer of other parameters that CPSR does not follow": discriminator,
    "The schedule ExponentialLR was not given to CPSR": schedule_of_an_epoch,
}


def trained(life: Life) -> str:
    torch.manual_seed(0)
    rows = torch.randn(128, WIDTH)
    loader = DataLoader(TensorDataset(rows, rows[:, :4]), batch_size=8, shuffle=True)
    module = nn.Linear(WIDTH, 4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    act = OTHERS[life.options["other"]]()
    with CPSRRecovery(TorchAdapter(module, optimizer), life.config(mode=life.options["mode"])) as recovery:
        for inputs, targets in recovery.resume(loader, epochs=1):
            loss = functional.mse_loss(module(inputs), targets)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            act(recovery, module, optimizer)
    return digest(module)


@pytest.mark.parametrize("other", OTHERS)
def test_mode_exact_ends_the_job(other: str, tmp_path: Path) -> None:
    ended = live(trained, Life(tmp_path, options={"other": other, "mode": "exact"}))
    assert ended.statuses == [1]
    assert other in ended.output.split("UnsupportedEngineError: mode 'exact' cannot restore all")[1]


def test_other_modes_report_it_once(tmp_path: Path) -> None:
    other = next(iter(OTHERS))
    ended = live(trained, Life(tmp_path, options={"other": other, "mode": "auto"}))
    assert ended.result
    assert ended.output.count(other) == 1


def adversarial(life: Life) -> str:
    """A discriminator that is registered, and steps first."""
    torch.manual_seed(0)
    rows = torch.randn(160, WIDTH)
    loader = DataLoader(TensorDataset(rows), batch_size=8, shuffle=True)
    makes, judges = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (makes, judges))
    scheduled = life.options.get("schedule", "before")
    schedule = torch.optim.lr_scheduler.ConstantLR(other) if scheduled == "before" else None
    engine = nn.ModuleList([makes, judges]) if life.options.get("judges") == "engine" else makes
    often, given = life.options.get("often", 1), life.options.get("given", False)
    optimizers = [other, optimizer] if given else [optimizer]
    with CPSRRecovery(TorchAdapter(engine, optimizers), life.config()) as recovery:
        if (saved := life.options.get("judges", "module")) == "module":
            recovery.register("judges", judges)
        elif saved == "tensors":
            recovery.register("judges", dict(judges.named_parameters()))
        if not given:
            recovery.register("optimizer of judges", other)
        schedule = schedule or torch.optim.lr_scheduler.ConstantLR(other)
        if scheduled != "unsaved":
            recovery.register("schedule of judges", schedule)
        for (real,) in recovery.resume(loader, epochs=often):
            made = makes(torch.randn(8, 4))
            backward(functional.softplus(judges(made.detach()) - judges(real)).mean())
            other.step()
            schedule.step()
            other.zero_grad()
            if recovery.batch % often:
                continue
            backward(functional.softplus(-judges(made)).mean())
            other.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
            life.step(recovery.iteration)
    return digest(makes, judges)


def test_a_registered_one_comes_back(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(adversarial, tmp_path, at=13, schedule="inside")
    assert cut.result == alone.result


def test_one_that_steps_three_times_in_a_step_is_registered(tmp_path: Path) -> None:
    alone, cut = alone_and_cut(adversarial, tmp_path, at=13, often=3, judges="engine")
    assert cut.result == alone.result
    assert "exact, checked over" in cut.output
    ended = live(adversarial, Life(tmp_path / "given", options={"often": 3, "given": True, "judges": "engine"}))
    assert ended.statuses == [1]
    assert 'is registered instead: recovery.register("optimizer of judge", optimizer)' in ended.output


def test_its_schedule_must_be_registered_too(tmp_path: Path) -> None:
    ended = live(adversarial, Life(tmp_path, options={"schedule": "unsaved"}))
    assert ended.statuses == [1]
    assert "The schedule ConstantLR was not given to CPSR" in ended.output


def test_one_over_parameters_that_nobody_saves_is_reported_by_the_repeated_steps(tmp_path: Path) -> None:
    _, cut = alone_and_cut(adversarial, tmp_path, at=13, judges="nobody")
    # The first step after the checkpoint of 10, or after that of 5 if the other was not durable when the kill came.
    assert re.search(r"this loop is not restored: in step (6|11), which .* repeats, the weights differ", cut.output)
    assert live(adversarial, Life(tmp_path / "tensors", options={"judges": "tensors"})).result
