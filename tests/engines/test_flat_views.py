"""Views of the state are kept while they are of the engine's tensors: a stale one would save an old state."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cpsr.engines import TorchAdapter
from cpsr.state import codec
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


class Changing:
    """A model with state of every kind, of which anything may change between two snapshots."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(2, 2))
        self.module.register_buffer("scale", torch.ones(2))
        trained, frozen = [*self.module[:3].parameters()], [*self.module[3].parameters()]
        for one in frozen:
            one.requires_grad_(False)
        groups: Any = [{"params": trained[:4]}, {"params": trained[4:], "lr": 0.2}]
        self.optimizer: Any = torch.optim.AdamW(groups, lr=0.1)
        self.adapter = TorchAdapter(self.module, self.optimizer)

    @property
    def weight(self) -> Any:
        return self.module[0].weight

    @property
    def kept(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[self.weight]
        return found

    def snapshot(self, adapter: TorchAdapter) -> dict[str, Any]:
        shard, scalars = adapter.shard(), adapter.scalars()
        tensors = {key: values.clone() for key, values in shard.all_tensors()}
        return {"tensors": tensors, "scalars": scalars, "places": [*shard.operators]}

    def step(self) -> None:
        if self.kept and self.kept.keys() != {"step", "exp_avg", "exp_avg_sq"}:
            self.kept.clear()
        self.optimizer.zero_grad()
        self.module(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()

    def other_rate(self) -> None:
        self.optimizer.param_groups[1]["lr"] *= 0.5

    def loaded(self) -> None:
        if "step" in self.kept or not self.kept:  # AdamW itself loads no other entry
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def other_moment(self) -> None:
        self.kept["exp_avg"] = self.kept.get("exp_avg", torch.zeros(4, 3)) + 1.0

    def other_memory(self) -> None:
        self.weight.data = self.weight.data + 1.0

    def other_memory_of_a_moment(self) -> None:
        if "exp_avg" in self.kept:
            self.kept["exp_avg"].data = self.kept["exp_avg"].data + 1.0

    def turned(self) -> None:
        order = (1, 4) if self.weight.is_contiguous() else (3, 1)
        self.weight.data = torch.randn(12).as_strided((4, 3), order)

    def other_step(self) -> None:
        self.kept["step"] = torch.tensor(7.0)

    def step_of_another_type(self) -> None:
        self.kept["step"] = torch.tensor(3.0, dtype=torch.float64)

    def lost(self) -> None:
        self.optimizer.state.pop(self.weight, None)

    def emptied(self) -> None:
        self.optimizer.state.clear()

    def renamed(self) -> None:
        if "exp_avg" in self.kept:
            self.kept["average"] = self.kept.pop("exp_avg")

    def beside(self) -> None:
        self.optimizer.state["shared"] = {"count": len(self.optimizer.state), "sum": torch.ones(2)}

    def turned_moment(self) -> None:
        if "exp_avg" in self.kept:
            moment = self.kept["exp_avg"]
            moment.as_strided_((4, 3), (1, 4) if moment.is_contiguous() else (3, 1))

    def one_more_empty_group(self) -> None:
        self.optimizer.add_param_group({"params": []})

    def one_more_trained(self) -> None:
        if not any(one is self.module[3].weight for group in self.optimizer.param_groups for one in group["params"]):
            self.optimizer.add_param_group({"params": [*self.module[3].parameters()], "lr": 0.3})

    def groups_exchanged(self) -> None:
        self.optimizer.param_groups[0] = dict(self.optimizer.param_groups[0])

    def frozen_written(self) -> None:
        self.module[3].weight.data.add_(1.0)

    def frozen_elsewhere(self) -> None:
        self.module[3].weight.data = torch.randn(2, 2)

    def buffer_written(self) -> None:
        self.module.scale.mul_(2.0)

    def buffer_replaced(self) -> None:
        self.module.scale = torch.randn(2)

    def buffer_elsewhere(self) -> None:
        self.module[1].running_mean.data = torch.randn(4)

    def part_replaced(self) -> None:
        other = nn.BatchNorm1d(4)
        other.running_var = torch.rand(4)
        other.weight, other.bias = self.module[1].weight, self.module[1].bias
        self.module[1] = other


CHANGES = [name for name, one in vars(Changing).items() if callable(one) and name not in ("__init__", "snapshot")]


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=12), trained=st.booleans())
def test_a_snapshot_after_any_change_is_that_of_an_adapter_that_remembers_nothing(
    changes: list[str], *, trained: bool
) -> None:
    changing = Changing()
    if trained:
        changing.step()
    changing.snapshot(changing.adapter)
    for change in changes:
        with torch.no_grad() if change != "step" else nullcontext():
            getattr(changing, change)()
        found = changing.snapshot(changing.adapter)
        anew = changing.snapshot(TorchAdapter(changing.module, changing.optimizer))
        assert found["places"] == anew["places"]
        assert codec.same(found, anew), change
