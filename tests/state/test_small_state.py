"""The small state is the same whether a GPU still has a part of it or not, and nothing waits for that part."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cpsr.errors import SaveError
from cpsr.state import device_values
from cpsr.state.codec import SmallState, same
from cpsr.state.device_values import Deadline, DeviceNumber, number
from tests.stand_in_device import StandInDevice, stand_in_device


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    with stand_in_device(2) as made:
        made.at_once = False
        yield made


def on(device: StandInDevice, tree: Any) -> Any:
    """The tree with its tensors on a device, and its `DeviceNumber`s too."""
    if isinstance(tree, torch.Tensor):
        return device.tensor(tree.clone())
    if isinstance(tree, DeviceNumber):
        return DeviceNumber(device.tensor(tree.value.clone()))
    if isinstance(tree, dict):
        return type(tree)((key, on(device, value)) for key, value in tree.items())
    return type(tree)(on(device, item) for item in tree) if isinstance(tree, list | tuple) else tree


def test_on_the_host_it_is_a_copy_at_once() -> None:
    rng = torch.arange(4)
    state = SmallState({"rng": rng, "step": DeviceNumber(torch.tensor(3.0)), 1: (2, None)})
    rng.zero_()
    tree = state.tree()
    assert tree["rng"].tolist() == [0, 1, 2, 3]
    assert (tree["step"], tree[1]) == (3.0, (2, None))


def test_what_a_device_has_comes_in_one_copy_and_is_bit_for_bit_the_same(device: StandInDevice) -> None:
    tensors = {
        "probe": torch.arange(7),
        "half": torch.randn(3, 2).half().t(),
        "flag": torch.tensor([True, False, True]),
        "double": torch.tensor(1 / 3, dtype=torch.float64),
        "nan": torch.tensor([float("nan"), -0.0]),
        "empty": torch.zeros(0, 3),
        "pair": (torch.tensor(2**62 + 1), OrderedDict([(1, torch.tensor(5, dtype=torch.int32))])),
    }
    numbers = {"steps": [1.0, 2.0, 3.0], "tracker": 7, "exact": 2**62 + 1, "found": True}
    steps = [DeviceNumber(torch.tensor(step)) for step in (1.0, 2.0, 3.0)]
    pending: dict[str, Any] = {"steps": steps, "tracker": DeviceNumber(torch.tensor(7, dtype=torch.int32))}
    pending |= {"exact": DeviceNumber(torch.tensor(2**62 + 1)), "found": DeviceNumber(torch.tensor(True))}
    tree = on(device, {**tensors, **pending})
    state = SmallState(tree)
    assert device.calls("synchronize") == []
    assert [what for _, _, what in device.calls("launch")].count("copy_d2h") == 1
    for value in (*tree["steps"], tree["tracker"]):
        value.value.zero_()  # by the next update
    tree["probe"].zero_()
    state.wait()
    assert same(state.tree(), {**tensors, **numbers})


def test_more_than_pinned_memory_takes_is_copied_at_once(
    device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_values, "PINNED_BYTES_MAX", 4 * device_values.PACKED_BYTES)
    large = torch.randn(2 * device_values.PACKED_BYTES)
    assert torch.equal(SmallState({"large": device.tensor(large)}).tree()["large"], large)


def test_of_another_device_it_is_waited_for(device: StandInDevice) -> None:
    first, second = DeviceNumber(device.tensor(torch.tensor(1.0))), device.tensor(torch.ones(2), 1)
    state = SmallState([first, second, DeviceNumber(device.tensor(torch.tensor(2.0), 1))])
    assert {stream for _, stream, _ in device.calls("synchronize")} == {"default:1"}
    state.wait()
    assert same(state.tree(), [1.0, torch.ones(2), 2.0])


def test_a_device_that_hangs_is_not_waited_for_behind_the_deadline(device: StandInDevice) -> None:
    device.hang()
    state = SmallState({"step": DeviceNumber(device.tensor(torch.tensor(1.0)))})
    with pytest.raises(SaveError, match=r"has not finished what was queued .* within 0\.05 s"):
        state.wait(Deadline(0.05))


def test_a_number_is_waited_for_unless_it_may_stay_on_its_device(device: StandInDevice) -> None:
    value = device.tensor(torch.tensor(4))
    assert isinstance(number(value, on_device=True), DeviceNumber)
    assert device.trace == []
    assert number(value, on_device=False) == 4
    assert number(torch.tensor(4), on_device=True) == 4
