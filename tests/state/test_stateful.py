"""What can be registered comes back as it was, through the encoding that checkpoints use."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from cpsr.errors import ConfigError
from cpsr.state.codec import decode, encode, same
from cpsr.state.user_objects import stateful


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)


def stepped(scheduler: Any) -> Callable[[], Any]:
    def step() -> list[float]:
        scheduler.optimizer.step()
        scheduler.step()
        return [scheduler.last_epoch, *scheduler.get_last_lr()]

    return step


def on_plateau(scheduler: lr_scheduler.ReduceLROnPlateau) -> Callable[[], Any]:
    def step() -> list[float]:
        scheduler.step(torch.tensor(1.0))
        return [scheduler.num_bad_epochs, scheduler.last_epoch]

    return step


def averaged(model: swa_utils.AveragedModel) -> Callable[[], Any]:
    source = nn.Linear(2, 1)

    def update() -> list[float]:
        with torch.no_grad():
            source.weight.fill_(1.0)
        model.update_parameters(source)
        return [float(model.get_buffer("n_averaged")), *model.get_parameter("module.weight").flatten().tolist()]

    return update


# Makes an object, and a function that changes it and returns a value of its state.
KINDS: dict[str, Callable[[], tuple[Any, Callable[[], Any]]]] = {
    "torch.Generator": lambda: (one := torch.Generator(), lambda: float(torch.rand((), generator=one))),
    "NumPy Generator": lambda: (one := numpy.random.default_rng(), lambda: one.normal()),
    "NumPy RandomState": lambda: (one := numpy.random.RandomState(), lambda: one.normal()),
    "random.Random": lambda: (one := random.Random(), lambda: one.gauss()),
    "StepLR": lambda: (one := lr_scheduler.StepLR(optimizer(), 2), stepped(one)),
    "OneCycleLR": lambda: (one := lr_scheduler.OneCycleLR(optimizer(), 0.5, 20), stepped(one)),
    "CyclicLR": lambda: (one := lr_scheduler.CyclicLR(optimizer(), 0.1, 0.5, 4), stepped(one)),
    "ReduceLROnPlateau": lambda: (
        one := lr_scheduler.ReduceLROnPlateau(optimizer(), patience=0),
        on_plateau(one),
    ),
    "AveragedModel": lambda: (one := swa_utils.AveragedModel(nn.Linear(2, 1)), averaged(one)),
    "dict": lambda: (one := {"seen": 0, "best": float("inf")}, lambda: one.update(seen=one["seen"] + 1) or dict(one)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_as_it_was(kind: str) -> None:
    one, change = KINDS[kind]()
    change()
    data, tensors = encode(stateful("it", one).state_dict())
    kept = json.dumps(data)
    expected = [change() for _ in range(3)]
    other, change = KINDS[kind]()
    item = stateful("it", other)
    item.load_state_dict(decode(json.loads(kept), tensors))
    if kind not in ("StepLR", "OneCycleLR", "CyclicLR"):  # of those the optimizer keeps a part
        assert [change() for _ in range(3)] == expected
    else:
        assert change()[0] == expected[0][0]
    again, _ = KINDS[kind]()
    stateful("it", again).load_state_dict(decode(json.loads(kept), tensors))
    assert same(stateful("it", again).state_dict(), decode(json.loads(kept), tensors))


@pytest.mark.parametrize("wrong", [object(), 3, [1, 2], None])
def test_anything_else_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=rf"register\('best', ...\): {type(wrong).__name__} has no state_dict"):
        stateful("best", wrong)


def test_what_the_script_refers_to_inside_of_a_dictionary_is_restored_in_its_place() -> None:
    weights, seen, inner = torch.zeros(2), numpy.zeros(2), [2]
    order: list[Any] = [1, inner]
    content: dict[str, Any] = {"ema": {"w": weights}, "seen": seen, "order": order, "new": {}, "shape": [torch.ones(1)]}
    ema = content["ema"]
    saved = decode(*encode(content))
    adapted = stateful("state", content)
    weights += 1
    seen += 1
    ema["later"] = 5
    order.append(3)
    inner.append(4)
    content["new"]["x"] = 1
    content["shape"] = [torch.ones(3)]
    adapted.load_state_dict(decode(*encode(saved)))
    assert same(content, saved)
    assert content["ema"] is ema
    assert ema["w"] is weights
    assert content["seen"] is seen
    assert content["order"] is order
    assert order[1] is inner
    assert weights.tolist() == seen.tolist() == [0, 0]


def test_what_was_two_objects_and_is_one_now_becomes_two_again() -> None:
    """As a best state that the loop takes over from the present one."""
    content: dict[str, Any] = {
        "best": torch.zeros(1),
        "now": torch.ones(1),
        "a": [0],
        "b": [1],
        "c": {"x": 0},
        "d": {"x": 1},
    }
    saved = decode(*encode(content))
    content |= {"best": content["now"], "a": content["b"], "c": content["d"]}
    stateful("state", content).load_state_dict(decode(*encode(saved)))
    assert same(content, saved)


def test_what_is_one_object_stays_one() -> None:
    one = torch.zeros(2, 2)
    content: dict[str, Any] = {"one": one, "flat": one.view(-1), "same": one, "a": (inner := {"x": 0}), "b": inner}
    saved = decode(*encode(content))
    one += 1
    inner["x"] = 1
    stateful("state", content).load_state_dict(decode(*encode(saved)))
    assert same(content, saved)
    assert content["same"] is one
    assert content["flat"].data_ptr() == one.data_ptr()
    assert content["a"] is content["b"] is inner
