"""The small state is put back after something was tried out, and what did not change is left alone."""

import random
from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import TorchAdapter
from cpsr.learning.bubbles import Bubbles
from cpsr.learning.learner import Learner
from cpsr.life.run_state import RunState
from cpsr.predictor.line import LinePredictor
from cpsr.restart.prediction import Probes
from cpsr.state.codec import SmallState
from cpsr.state.losses import LossRecorder, Step
from tests.stand_in_device import stand_in_device


class Counter:
    """A registered object that notes how often it was loaded."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"seen": 1, "mean": torch.tensor([1.0, float("nan")])}
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state
        self.loaded += 1


def draws() -> list[float]:
    return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]


def test_random_states_and_changed_objects_are_put_back() -> None:
    module = nn.Linear(2, 1)
    adapter = TorchAdapter(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state = RunState(adapter, LossRecorder(1), Probes(adapter, 0), Learner(LinePredictor()))
    changed, untouched = Counter(), Counter()
    state.register("changed", changed)
    state.register("untouched", untouched)
    captured = state.capture().to_tree()
    kept = {name: {**item} for name, item in captured["registered"].items()}  # as a host buffer's copy would
    kept["changed"]["mean"] = kept["changed"]["mean"].clone()
    expected = draws()
    changed.values["seen"] += 1
    changed.values["mean"] += 1
    state.put_back(type(state.capture()).from_tree(captured | {"registered": kept}))
    assert draws() == expected
    assert changed.values["seen"] == 1
    assert changed.values["mean"][0] == 1.0
    assert (changed.loaded, untouched.loaded) == (1, 0)


def test_on_a_device_a_capture_waits_for_nothing() -> None:
    module = nn.Linear(2, 1)
    adapter = TorchAdapter(module, torch.optim.AdamW(module.parameters(), fused=True))
    module(torch.ones(1, 2)).sum().backward()
    adapter.optimizer.step()  # creates its state
    losses = LossRecorder(10)
    state = RunState(adapter, losses, Probes(adapter, 0), Learner(LinePredictor()))
    with stand_in_device() as device:
        device.at_once = False
        for kept in adapter.optimizer.state.values():
            kept["step"] = device.tensor(kept["step"])
        losses.add(device.tensor(torch.tensor(2.5)))
        losses.end_iteration(Step(1, 0.1, 0.1, True))
        captured, left = SmallState(state.capture().to_tree()), SmallState(state.left())
        assert device.calls("synchronize") == []
        captured.wait()
        left.wait()
        assert captured.tree()["recent_losses"] == [2.5]
        assert captured.tree()["engine"] == left.tree()["engine"] == adapter.scalars()


def test_waits_for_batches_of_other_processes_are_counted() -> None:
    module = nn.Linear(2, 1)
    adapter = TorchAdapter(module, torch.optim.SGD(module.parameters(), lr=0.1))
    bubbles = Bubbles()
    waiting = partial(bubbles.waiting, "data")
    state = RunState(adapter, LossRecorder(1), Probes(adapter, 0), Learner(LinePredictor()), waiting)
    loader = DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=2, num_workers=1)
    began = perf_counter()
    assert len(list(state.stream(loader, epochs=1, repeat=False))) == 1
    ended = perf_counter()
    assert bubbles.beside(began, ended) < ended - began


def test_the_state_of_a_loader_goes_on_between_two_passes_but_not_where_one_was_left_early() -> None:
    module = nn.Linear(2, 1)
    adapter = TorchAdapter(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state = RunState(adapter, LossRecorder(1), Probes(adapter, 0), Learner(LinePredictor()))
    loader = Counted()
    assert len(list(state.stream(loader, epochs=None, repeat=False))) == 3
    state.end_step()
    assert state.capture().data.loader is None  # the next stream may be of another loader
    second = state.stream(loader, epochs=None, repeat=False)
    between = state.capture().data
    assert between.loader is not None
    assert (between.batches, between.loader["state"], between.loader["between"]) == (3, {"passes": 1, "at": 0}, True)
    next(second)
    state.end_step()
    inside = state.capture().data
    assert inside.loader is not None
    assert (inside.batches, inside.loader["state"], inside.loader["between"]) == (4, {"passes": 1, "at": 1}, False)
    state.stream(loader, epochs=None, repeat=False)
    assert state.capture().data.loader is None
    next(state.stream(Counted(), epochs=None, repeat=False))
    state.end_step()
    other = state.capture().data.loader
    assert other is not None
    assert other["state"] == {"passes": 0, "at": 1}


class Counted:
    """A loader that has a state."""

    def __init__(self) -> None:
        self.passes = self.at = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(3):
            self.at += 1
            yield self.at
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.at = state["passes"], state["at"]
