"""What a loop keeps and nobody saves is found when it is used, and nothing else is."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from cpsr import TorchAdapter
from cpsr.errors import UnsupportedEngineError
from cpsr.life.unsaved_objects import Unsaved


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

    def __init__(self) -> None:
        self.module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.adapted: dict[str, Any] = {}
        self.registered: list[Any] = []
        self.others: list[Any] = []
        self.after_step: list[Callable[[], Any]] = []
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def step(self) -> list[str]:
        messages: list[str] = []
        adapter = TorchAdapter(self.module, self.optimizer, **self.adapted)
        unsaved = Unsaved(adapter, lambda: self.registered, True, lambda kind, message, *_: messages.append(message))
        try:
            for _ in range(3):
                self.scaler.scale(self.module(torch.ones(4, 3)).sum()).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                for act in self.after_step:
                    act()
        finally:
            unsaved.close()
        return messages


def made(loop: Loop) -> Any:
    loop.others.append(lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1.0))
    return loop.others[-1]


def schedule(loop: Loop) -> None:
    scheduler = made(loop)
    loop.after_step.append(lambda: scheduler.step())


def schedules(loop: Loop) -> None:
    schedule(loop)
    loop.adapted["scheduler"] = lr_scheduler.StepLR(loop.optimizer, 1)
    loop.after_step.append(loop.adapted["scheduler"].step)


def chained(loop: Loop) -> None:
    loop.others.append(lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(loop.optimizer, 1)]))
    loop.after_step.append(lambda: loop.others[0].step())


def scaler(loop: Loop) -> None:
    loop.scaler = torch.amp.GradScaler("cpu")


def average(loop: Loop) -> None:
    loop.others.append(swa_utils.AveragedModel(loop.module))
    loop.after_step.append(lambda: loop.others[-1].update_parameters(loop.module))


def without_state(loop: Loop) -> None:
    loop.others.append(torch.optim.SGD(loop.module[1].parameters()))
    loop.after_step.append(loop.others[-1].step)


class Lookahead(torch.optim.Optimizer):
    """Shares the groups of the optimizer that it wraps, and keeps slow weights of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            slow.lerp_(parameter, 0.5)


def lookahead(loop: Loop) -> None:
    loop.others.append(Lookahead(loop.optimizer))
    loop.after_step.append(loop.others[0].step)


class Container(torch.optim.Optimizer):
    """Steps the optimizers that it holds, and keeps nothing of its own, as torchtitan's."""

    def __init__(self, held: list[torch.optim.Optimizer]) -> None:
        parameters = [one for each in held for group in each.param_groups for one in group["params"]]
        super().__init__(list(dict.fromkeys(parameters)), {})
        self.held = held

    def step(self, closure: Any = None) -> Any:
        for one in self.held:
            one.step()


def container(loop: Loop) -> None:
    loop.others.append(Container([loop.optimizer]))
    loop.after_step.append(loop.others[0].step)


def container_of_another(loop: Loop) -> None:
    without_state(loop)
    loop.after_step = [Container([loop.optimizer, loop.others[0]]).step]


def held_by_what_saves_else(loop: Loop) -> None:
    """As a trainer that is registered for its counters."""
    average(loop)
    saves: Any = {"state_dict": lambda: {"step": 1}, "load_state_dict": print}
    loop.registered = [SimpleNamespace(average=loop.others[0], **saves)]


UNSAVED: dict[str, tuple[Callable[[Loop], None], str]] = {
    "chained schedules": (chained, "The schedule ChainedScheduler was not given"),
    "one of two schedules": (schedules, "The schedule LambdaLR was not given"),
    "second optimizer without state": (without_state, "SGD steps, an optimizer of parameters of the same"),
    "second optimizer in a container": (container_of_another, "SGD steps, an optimizer of parameters of the same"),
    "average that a registered object does not save": (held_by_what_saves_else, "The averaged weights"),
    "wrapper with state of its own": (lookahead, "Lookahead steps, an optimizer of parameters of the same"),
}


@pytest.mark.parametrize("kind", UNSAVED)
def test_what_nobody_saves_is_found(kind: str) -> None:
    prepare, message = UNSAVED[kind]
    loop = Loop()
    prepare(loop)
    with pytest.raises(UnsupportedEngineError, match=message):
        loop.step()


def given(loop: Loop) -> None:
    scaler(loop)
    loop.adapted = {"scheduler": lr_scheduler.StepLR(loop.optimizer, 1), "grad_scaler": loop.scaler}


def parts(loop: Loop) -> None:
    both = [lr_scheduler.StepLR(loop.optimizer, 1), lr_scheduler.ExponentialLR(loop.optimizer, 0.9)]
    loop.adapted["scheduler"] = lr_scheduler.SequentialLR(loop.optimizer, both, milestones=[2])


def wrapped(loop: Loop) -> None:
    loop.adapted["scheduler"] = Wrapper(lr_scheduler.StepLR(loop.optimizer, 1))


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "its methods": lambda one: SimpleNamespace(state_dict=one.state_dict, load_state_dict=one.load_state_dict),
    "a closure": lambda one: SimpleNamespace(state_dict=lambda: one.state_dict(), load_state_dict=one.load_state_dict),
    "a partial function": lambda one: SimpleNamespace(state_dict=partial(type(one).state_dict, one), load_state_dict=1),
    "a part of it": Wrapper,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_however_what_is_registered_holds_it_it_is_not_refused(holder: str) -> None:
    loop = Loop()
    for prepare in (schedule, average, scaler):
        prepare(loop)
    loop.registered = [HOLDERS[holder](one) for one in (*loop.others, loop.scaler)]
    assert loop.step() == []


def earlier_phase(loop: Loop) -> None:
    loop.others.append(torch.optim.AdamW(loop.module.parameters()))
    loop.module(torch.ones(4, 3)).sum().backward()
    loop.others[0].step()


def teacher(loop: Loop) -> None:
    loop.others.append(swa_utils.AveragedModel(loop.module))
    loop.others[0].update_parameters(loop.module)


def made_inside(loop: Loop) -> None:
    """Constructors step their schedules."""
    parts: list[Any] = [lr_scheduler.StepLR, lr_scheduler.CosineAnnealingWarmRestarts]
    loop.after_step.append(lambda: parts and parts.pop()(loop.optimizer, 3))


def registered(loop: Loop) -> None:
    schedule(loop)
    scaler(loop)
    average(loop)
    loop.registered = [*loop.others, loop.scaler]


def of_another(loop: Loop) -> None:
    other = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
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
    "a teacher of an earlier phase": teacher,
    "an optimizer of an earlier phase": earlier_phase,
    "schedules that are made inside": made_inside,
    "of another model": of_another,
    "container of the engine's optimizers": container,
}


@pytest.mark.parametrize("kind", SAVED)
def test_nothing_else_is_found(kind: str) -> None:
    loop = Loop()
    SAVED[kind](loop)
    assert loop.step() == []
