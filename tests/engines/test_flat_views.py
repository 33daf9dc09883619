"""Views are kept while they are the engine's tensors, and no longer: one that is stale would save an old state."""

import copy
from collections.abc import Callable

import pytest
import torch

from cpsr.engines.optimizer_state import OptimizerState, Updated

NAME = "weight"


class _Trained:
    """One parameter under Adam, or SGD with momentum, after a step; and its views."""

    def __init__(self, momentum: float | None = None, name: str = NAME) -> None:
        self.name = name
        self.parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW([self.parameter], lr=0.1)
            if momentum is None
            else torch.optim.SGD([self.parameter], lr=0.1, momentum=momentum)
        )
        self.state = OptimizerState([self.optimizer])
        self.step()

    def step(self) -> None:
        self.parameter.grad = torch.ones_like(self.parameter)
        self.optimizer.step()

    def taken(self, owned: slice = slice(None)) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values, moments = self.state.views(NAME, self.updated()[0], owned)
        self.kept = values, moments
        return values, moments

    def unchanged(self) -> bool:
        """Whether the views are those of the last time."""
        values, moments = self.kept
        again, moments_again = self.state.views(NAME, self.updated()[0])
        return again is values and all(moments_again[key] is moment for key, moment in moments.items())

    def updated(self) -> list[Updated]:
        groups = self.optimizer.param_groups
        return [Updated(self.optimizer, group, one, self.name) for group in groups for one in group["params"]]


def _replace_state(trained: _Trained) -> None:
    trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))


def _replace_one_moment(trained: _Trained) -> None:
    state = trained.optimizer.state[trained.parameter]
    state["exp_avg"] = state["exp_avg"] + 1.0


def _replace_memory(trained: _Trained) -> None:
    trained.parameter.data = trained.parameter.data + 1.0


def _replace_memory_of_a_moment(trained: _Trained) -> None:
    state = trained.optimizer.state[trained.parameter]
    state["exp_avg"].data = state["exp_avg"].data + 1.0


def _transpose(trained: _Trained) -> None:
    trained.parameter.data = trained.parameter.data.t()
    for moment in ("exp_avg", "exp_avg_sq"):
        state = trained.optimizer.state[trained.parameter]
        state[moment] = state[moment].t()


def test_views_are_made_once() -> None:
    trained = _Trained()
    values, moments = trained.taken()
    trained.step()
    again, moments_again = trained.taken()
    assert again is values
    assert all(moments_again[key] is moment for key, moment in moments.items())
    assert torch.equal(values, trained.parameter.detach().view(-1))


@pytest.mark.parametrize(
    "change",
    [_replace_state, _replace_one_moment, _replace_memory, _replace_memory_of_a_moment, _transpose],
)
def test_what_was_replaced_is_seen(change: Callable[[_Trained], None]) -> None:
    trained = _Trained()
    trained.taken()
    assert trained.unchanged()
    trained.step()
    assert trained.unchanged()
    change(trained)
    assert not trained.unchanged()
    values, moments = trained.taken()
    state = trained.optimizer.state[trained.parameter]
    with torch.no_grad():
        values.fill_(7.0)
        for key, moment in moments.items():
            moment.fill_(float(len(key)))
    assert torch.equal(trained.parameter.detach(), torch.full(trained.parameter.shape, 7.0))
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[key], torch.full(state[key].shape, float(len(key))))


def test_a_buffer_that_the_next_step_creates_is_seen() -> None:
    trained = _Trained(momentum=0.9)
    trained.taken()
    before = trained.taken()[1]["momentum_buffer"]
    assert before.any()
    trained.optimizer.state[trained.parameter]["momentum_buffer"] = None  # as old state dicts have it
    assert not trained.unchanged()
    _, moments = trained.taken()
    assert torch.equal(moments["momentum_buffer"], torch.zeros(6))
    assert trained.unchanged()
    trained.step()
    assert not trained.unchanged()


def test_absent_state_is_zeros_that_take_no_memory() -> None:
    trained = _Trained()
    trained.optimizer.state.clear()
    _, moments = trained.taken()
    assert {key: (moment.shape, bool(moment.any())) for key, moment in moments.items()} == {
        "exp_avg": ((6,), False),
        "exp_avg_sq": ((6,), False),
    }
    assert all(moment.untyped_storage().nbytes() == 4 for moment in moments.values())
    assert trained.unchanged()
    assert not trained.optimizer.state, "looking at the state creates nothing"
    with pytest.raises(RuntimeError, match="single memory location"):
        moments["exp_avg"].copy_(torch.ones(6))
    trained.step()
    assert not trained.unchanged()


def test_another_slice_is_another_view() -> None:
    trained = _Trained(name="")  # of several parameters
    assert trained.taken(slice(0, 2))[0].numel() == 2
    values, moments = trained.taken(slice(2, 6))
    assert torch.equal(values, trained.parameter.detach().view(-1)[2:])
    assert moments["exp_avg"].numel() == 4
