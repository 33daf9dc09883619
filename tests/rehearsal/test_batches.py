"""Batches are kept as they were trained on, whatever the loop does with its tensors afterwards."""

from typing import Any

import numpy
import pytest
import torch

from cpsr.rehearsal.batches import TrainedBatches
from tests.stand_in_device import stand_in_device

LIMIT_BYTES = 1000


def batches(per_iteration: int = 1) -> TrainedBatches:
    return TrainedBatches(per_iteration, torch.device("cpu"), LIMIT_BYTES)


def test_inputs_that_the_loop_overwrites_are_kept() -> None:
    kept, array = batches(), numpy.arange(3.0)
    tensor = torch.from_numpy(array)  # changes through numpy are seen by no version counter
    for value in range(2):
        array[:] = value
        kept.add((tensor, [tensor, 7]), {"mask": {"inner": (tensor, None, "x", True)}})
        kept.add_loss(torch.tensor(float(value)))
        kept.end_iteration(True)
    array[:] = 9
    for value, (batch,) in enumerate(kept.iterations):
        args, kwargs = batch.arguments()
        same = torch.full((3,), float(value), dtype=torch.float64)
        assert torch.equal(args[0], same)
        assert torch.equal(args[1][0], same)
        assert args[1][1] == 7
        assert torch.equal(kwargs["mask"]["inner"][0], same)
        assert kwargs["mask"]["inner"][1:] == (None, "x", True)
    assert kept.losses().tolist() == [[0.0], [1.0]]
    assert kept.problem is None
    assert kept.seconds > 0


def test_losses_are_those_of_their_time_and_inputs_ask_for_gradients_as_before() -> None:
    kept, loss = batches(2), torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(2):
        kept.add((torch.ones(2, requires_grad=True), torch.ones(2)), {})
        kept.add_loss(loss)
        loss += 1
    kept.end_iteration(True)
    assert kept.losses().tolist() == [[1.0, 2.0]]
    first, second = kept.iterations[0][0].arguments()[0]
    assert (first.requires_grad, second.requires_grad) == (True, False)


def test_inputs_on_a_device_are_copied_in_the_order_of_its_stream_and_nothing_waits() -> None:
    with stand_in_device() as device:
        device.at_once = False
        kept = TrainedBatches(1, torch.device("cuda", 0), LIMIT_BYTES)
        tensor = device.tensor(torch.zeros(3))
        for value in range(3):
            tensor.copy_(device.tensor(torch.full((3,), float(value))))  # as a loop that reuses it
            kept.add((tensor,), {"mask": [tensor]})
            kept.add_loss(device.tensor(torch.tensor(float(value))))
            kept.end_iteration(True)
        tensor.copy_(device.tensor(torch.full((3,), 9.0)))
        assert kept.problem is None
        again = [batch.arguments() for (batch,) in kept.iterations]
        assert device.calls("synchronize", "query", "wait_event", "record") == []
        device.complete()
        for value, ((one,), mask) in enumerate(again):
            for tensor in (one, mask["mask"][0]):
                assert tensor.is_cuda
                assert tensor.memory.tolist() == [value] * 3
        assert kept.losses().tolist() == [[0.0], [1.0], [2.0]]


def test_a_copy_that_fails_ends_the_keeping_and_not_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with stand_in_device() as device:
        kept = TrainedBatches(1, torch.device("cuda", 0), LIMIT_BYTES)
        monkeypatch.setattr(torch, "empty_like", refuses)
        kept.add((device.tensor(torch.zeros(3)),), {})
    assert kept.problem == "the inputs could not be copied to the host (CUDA error: out of memory)"
    assert kept.hopeless


class Strange:
    """Not plain data: who knows what it refers to."""


@pytest.mark.parametrize(
    ("args", "losses", "applied", "problem", "hopeless"),
    [
        ([(Strange(),)], 1, True, "Strange, which is not plain data", True),
        ([(1,), (2,)], 1, True, "2 forwards and 1 losses where 1 of each", True),
        ([(1,)], 0, True, "1 forwards and 0 losses", True),
        ([(1,)], 1, False, "an update was skipped", False),
    ],
)
def test_what_cannot_be_trained_on_again_is_reported(
    args: list[Any], losses: int, applied: bool, problem: str, hopeless: bool
) -> None:
    kept = batches()
    for arguments in args:
        kept.add(arguments, {})
    for _ in range(losses):
        kept.add_loss(torch.tensor(1.0))
    kept.end_iteration(applied)
    assert kept.problem is not None
    assert problem in kept.problem
    assert kept.hopeless == hopeless
    kept.add((1,), {})
    kept.add_loss(torch.tensor(1.0))
    kept.end_iteration(True)
    assert kept.iterations == []


def test_the_hosts_memory_is_not_filled() -> None:
    kept = batches()
    for _ in range(10):
        kept.add((torch.ones(20), [torch.ones(1)]), {"mask": {"inner": torch.ones(4)}})  # 100 bytes
        kept.add_loss(torch.tensor(1.0))
        kept.end_iteration(True)
    assert kept.problem is None
    kept.add((torch.ones(1),), {})
    assert kept.problem is not None
    assert "10 iterations" in kept.problem
    assert "take 1004 bytes" in kept.problem
    assert f"rehearsal.batches_limit_bytes = {LIMIT_BYTES}" in kept.problem
    assert kept.hopeless
    assert kept.iterations == []


def test_autocast_around_the_forward_is_refused() -> None:
    kept = batches()
    with torch.autocast("cpu"):
        kept.add((torch.ones(1),), {})
    assert kept.problem is not None
    assert "autocast" in kept.problem
