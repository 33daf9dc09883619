"""What a loop keeps and nobody saves is found by what it leaves, and nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from cpsr import TorchAdapter
from cpsr.errors import UnsupportedEngineError
from cpsr.unsaved import Unsaved


class Wrapper:
    """A user's schedule around torch's."""

    def __init__(self, scheduler: Any) -> None:
        self.parts = [scheduler]

    def step(self) -> None:
        self.parts[0].step()

    def state_dict(self) -> Any:
        return self.parts[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.parts[0].load_state_dict(state)


class Loop:
    """A module and its optimizer, and what else a case needs."""

    def __init__(self, fused: bool = False) -> None:
        self.module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1, fused=fused)
        self.adapted: dict[str, Any] = {}
        self.registered: list[Any] = []
        self.others: list[Any] = []
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(self, exact: bool = True) -> list[str]:
        told: list[str] = []
        adapter = TorchAdapter(self.module, self.optimizer, **self.adapted)
        unsaved = Unsaved(adapter, lambda: self.registered, exact, lambda kind, message, *_: told.append(message))
        for _ in range(2):
            self.scaler.scale(self.module(torch.ones(4, 3)).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        unsaved.close()
        return told


def schedule(loop: Loop) -> None:
    loop.others.append(lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0))


def schedules(loop: Loop) -> None:
    schedule(loop)
    loop.adapted["scheduler"] = lr_scheduler.StepLR(loop.optimizer, 1)


def scaler(loop: Loop) -> None:
    loop.scaler = torch.amp.GradScaler("cpu")


def average(loop: Loop) -> None:
    loop.others.append(swa_utils.AveragedModel(loop.module))


def second(loop: Loop) -> None:
    loop.optimizer = torch.optim.AdamW(loop.module[0].parameters())
    loop.others.append(torch.optim.SGD(loop.module[1].parameters()))


UNSAVED: dict[str, tuple[Callable[[Loop], None], bool, str]] = {
    "scaler": (scaler, False, "The GradScaler that scales the loss"),
    "scaler of a fused optimizer": (scaler, True, "The GradScaler that scales the loss"),
    "schedule": (schedule, False, "The schedule LambdaLR was not given"),
    "one of two schedules": (schedules, False, "The schedule LambdaLR was not given"),
    "average": (average, False, "AveragedModel"),
    "second optimizer": (second, False, "Another optimizer, SGD,"),
}


@pytest.mark.parametrize("kind", UNSAVED)
def test_what_nobody_saves_is_found(kind: str) -> None:
    prepare, fused, message = UNSAVED[kind]
    loop = Loop(fused)
    prepare(loop)
    before = [parameter.detach().clone() for parameter in loop.module.parameters()]
    with pytest.raises(UnsupportedEngineError, match=message):
        loop.step()
    assert all(map(torch.equal, before, loop.module.parameters()))
    loop = Loop(fused)
    prepare(loop)
    told = loop.step(exact=False)
    assert len(told) == 1
    assert message in told[0]


def given(loop: Loop) -> None:
    scaler(loop)
    loop.adapted = {"scheduler": lr_scheduler.StepLR(loop.optimizer, 1), "grad_scaler": loop.scaler}


def parts(loop: Loop) -> None:
    both = [lr_scheduler.StepLR(loop.optimizer, 1), lr_scheduler.ExponentialLR(loop.optimizer, 0.9)]
    loop.adapted["scheduler"] = lr_scheduler.SequentialLR(loop.optimizer, both, milestones=[2])


def wrapped(loop: Loop) -> None:
    loop.adapted["scheduler"] = Wrapper(lr_scheduler.StepLR(loop.optimizer, 1))


def registered(loop: Loop) -> None:
    schedule(loop)
    scaler(loop)
    average(loop)
    loop.registered = [*loop.others, {"scaler": loop.scaler}]


def forgotten(loop: Loop) -> None:
    """Tried and dropped, in a circle that only the garbage collector ends."""
    tried = lr_scheduler.StepLR(loop.optimizer, 1)
    tried.itself = tried  # type: ignore[attr-defined]


def of_another(loop: Loop) -> None:
    other = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    scaler_of_another = torch.amp.GradScaler("cpu")
    scaler_of_another.scale(other(torch.ones(5)).sum()).backward()
    scaler_of_another.step(optimizer)
    loop.others = [optimizer, scaler_of_another, lr_scheduler.StepLR(optimizer, 1), swa_utils.AveragedModel(other)]


SAVED: dict[str, Callable[[Loop], None]] = {
    "nothing": lambda loop: None,
    "given": given,
    "schedule in parts": parts,
    "schedule in a wrapper": wrapped,
    "registered": registered,
    "forgotten": forgotten,
    "of another model": of_another,
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", SAVED)
def test_nothing_else_is_found(kind: str, fused: bool) -> None:
    loop = Loop(fused)
    SAVED[kind](loop)
    assert loop.step() == []
