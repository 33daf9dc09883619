"""The small state is put back after something was tried out, and what did not change is left alone."""

import random
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cpsr import TorchAdapter
from cpsr.learning.bubbles import Bubbles
from cpsr.learning.learner import Learner
from cpsr.predictor.line import LinePredictor
from cpsr.restart.probes import Probes
from cpsr.saving.run_state import RunState
from cpsr.state.losses import LossRecorder


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
    state = RunState(adapter, LossRecorder(1), Probes(adapter, 0), Learner(LinePredictor(), None))
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


def test_waits_for_batches_of_other_processes_are_counted() -> None:
    module = nn.Linear(2, 1)
    adapter = TorchAdapter(module, torch.optim.SGD(module.parameters(), lr=0.1))
    bubbles = Bubbles()
    waiting = partial(bubbles.waiting, "data")
    state = RunState(adapter, LossRecorder(1), Probes(adapter, 0), Learner(LinePredictor(), None), waiting)
    loader = DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=2, num_workers=1)
    assert len(list(state.stream(loader, epochs=1, repeat=False))) == 1
    assert bubbles.account().bubble_seconds > 0
