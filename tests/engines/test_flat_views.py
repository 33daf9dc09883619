"""Views of the state are kept while they are of the engine's tensors: a stale one would save an old state."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cpsr.engines import TorchAdapter
from cpsr.state.shard import OperatorState


class Trained:
    """A matrix under AdamW, after a step."""

    def __init__(self) -> None:
        self.module: Any = nn.Linear(3, 2, bias=False)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.adapter = TorchAdapter(self.module, self.optimizer)
        self.step()

    def step(self) -> None:
        self.module(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[self.module.weight]
        return found

    def views(self) -> OperatorState:
        return self.adapter.shard().operators["weight"]


def _replace_state(trained: Trained) -> None:
    trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))


def _replace_one_moment(trained: Trained) -> None:
    trained.state["exp_avg"] = trained.state["exp_avg"] + 1.0


def _replace_memory(trained: Trained) -> None:
    trained.module.weight.data = trained.module.weight.data + 1.0


def _replace_memory_of_a_moment(trained: Trained) -> None:
    trained.state["exp_avg"].data = trained.state["exp_avg"].data + 1.0


def _transpose(trained: Trained) -> None:
    trained.module.weight.data = trained.module.weight.data.t()
    for moment in ("exp_avg", "exp_avg_sq"):
        trained.state[moment] = trained.state[moment].t()


def test_views_are_made_once() -> None:
    trained = Trained()
    before = trained.views()
    trained.step()
    after = trained.views()
    assert after.parameter.values is before.parameter.values
    assert all(after.moments[key] is moment for key, moment in before.moments.items())
    assert torch.equal(after.parameter.values, trained.module.weight.detach().view(-1))


@pytest.mark.parametrize(
    "change", [_replace_state, _replace_one_moment, _replace_memory, _replace_memory_of_a_moment, _transpose]
)
def test_what_was_replaced_is_seen(change: Callable[[Trained], None]) -> None:
    trained = Trained()
    trained.views()
    change(trained)
    with torch.no_grad():
        trained.views().parameter.values.fill_(7.0)
        for key, moment in trained.views().moments.items():
            moment.fill_(float(len(key)))
    assert bool((trained.module.weight == 7.0).all())
    for key in ("exp_avg", "exp_avg_sq"):
        assert bool((trained.state[key] == float(len(key))).all())


def test_absent_state_is_zeros_that_take_no_memory() -> None:
    trained = Trained()
    trained.optimizer.state.clear()
    moments = trained.views().moments
    assert {key: (moment.shape, bool(moment.any())) for key, moment in moments.items()} == {
        "exp_avg": ((6,), False),
        "exp_avg_sq": ((6,), False),
    }
    assert all(moment.untyped_storage().nbytes() == 4 for moment in moments.values())
    assert not trained.optimizer.state, "looking at the state creates nothing"
    with pytest.raises(RuntimeError, match="single memory location"):
        moments["exp_avg"].copy_(torch.ones(6))
    trained.step()
    assert trained.views().moments["exp_avg"].any()
