"""Weights that missed iterations, and make up for them by longer steps."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.catching_up import CatchingUp, Missed

RATE = 0.25  # of the learning; a power of two, so that sums are exact


def descent(size: int = 3) -> tuple[torch.nn.Parameter, torch.optim.SGD, Callable[[], None]]:
    """A weight whose gradient is 1 everywhere: each step takes `RATE` away."""
    weight = torch.nn.Parameter(torch.zeros(size))
    optimizer = torch.optim.SGD([weight], lr=RATE)

    def step() -> None:
        weight.grad = torch.ones(size)
        optimizer.step()

    return weight, optimizer, step


def test_steps_are_longer_until_what_was_missed_is_made_up() -> None:
    weight, optimizer, step = descent()
    catching_up = CatchingUp(optimizer)
    catching_up.begin({"late": Missed(weight.detach()[:2], 2.5)}, 2.0)  # the third element missed nothing
    taken = []
    for _ in range(4):
        before = weight.detach().clone()
        step()
        taken.append(((before - weight.detach()) / RATE).tolist())
    assert taken == [[2.0, 2.0, 1.0], [2.0, 2.0, 1.0], [1.5, 1.5, 1.0], [1.0, 1.0, 1.0]]
    assert not catching_up.left


@given(st.floats(1.01, 8.0), st.floats(0.0, 50.0))
def test_on_a_straight_way_it_arrives_where_it_would_have_been(factor: float, missed: float) -> None:
    weight, optimizer, step = descent(1)
    catching_up = CatchingUp(optimizer)
    catching_up.begin({"late": Missed(weight.detach(), missed)}, factor)
    steps = 0
    while catching_up.left:
        step()
        steps += 1
    assert steps == pytest.approx(missed / (factor - 1), abs=1.0)
    assert -weight.item() / RATE == pytest.approx(steps + missed, rel=1e-4, abs=1e-4)


def test_what_is_begun_anew_replaces_what_there_was_and_can_be_forgotten() -> None:
    weight, optimizer, step = descent()
    catching_up = CatchingUp(optimizer)
    catching_up.begin({"early": Missed(weight.detach(), 7.0)}, 3.0)
    catching_up.begin({"late": Missed(weight.detach(), 5.0), "in time": Missed(weight.detach(), 0.0)}, 2.0)
    assert catching_up.left == {"late": 5.0}
    step()
    assert catching_up.left == {"late": 4.0}
    catching_up.forget()
    step()
    assert weight.tolist() == [-3 * RATE] * 3
    assert not catching_up.left


def test_a_step_is_as_long_as_it_will_be_when_later_hooks_hear_of_it() -> None:
    """Also where catching up begins after they came: a snapshot may be begun there."""
    weight, optimizer, step = descent()
    catching_up, seen = CatchingUp(optimizer), list[list[float]]()
    optimizer.register_step_post_hook(lambda *_: seen.append(weight.tolist()))
    catching_up.begin({"late": Missed(weight.detach(), 1.0)}, 2.0)
    step()
    assert seen == [weight.tolist()] == [[-2 * RATE] * 3]


def test_the_hooks_come_off() -> None:
    weight, optimizer, step = descent()
    catching_up = CatchingUp(optimizer)
    catching_up.begin({"late": Missed(weight.detach(), 9.0)}, 2.0)
    catching_up.close()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    step()
    assert weight.tolist() == [-RATE] * 3


def test_a_step_of_other_parameter_groups_makes_up_for_nothing() -> None:
    weight, optimizer, step = descent()
    other = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [other]})
    catching_up = CatchingUp(optimizer)
    catching_up.begin({"late": Missed(weight.detach(), 2.0)}, 2.0)
    every = optimizer.param_groups
    optimizer.param_groups = every[1:]  # as ZeRO does, one group after the other
    step()
    assert catching_up.left == {"late": 2.0}
    assert weight.tolist() == [0.0] * 3
    optimizer.param_groups = every[:1]
    step()
    assert catching_up.left == {"late": 1.0}
    assert weight.tolist() == [-2 * RATE] * 3


@pytest.mark.parametrize("factor", [1.0, 0.5, float("inf"), float("nan")])
def test_a_factor_that_lengthens_nothing_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="above 1"):
        CatchingUp(descent()[1]).begin({}, factor)


@pytest.mark.parametrize("missed", [-1.0, float("inf"), float("nan")])
def test_what_cannot_be_made_up_is_refused_and_changes_nothing(missed: float) -> None:
    weight, optimizer, _ = descent()
    catching_up = CatchingUp(optimizer)
    good = Missed(weight.detach(), 1.0)
    with pytest.raises(ValueError, match="late missed"):
        catching_up.begin({"good": good, "late": Missed(weight.detach(), missed)}, 2.0)
    assert not catching_up.left
