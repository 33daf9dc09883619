"""Losses stay tensors until they are flushed, and every iteration gets its own."""

from collections.abc import Iterator

import pytest
import torch

from cpsr.state import losses
from cpsr.state.codec import SmallState
from cpsr.state.losses import RECENT_LOSSES, LossRecorder, Step
from tests.device import DEVICE
from tests.stand_in_device import StandInDevice, stand_in_device


def step(iteration: int) -> Step:
    return Step(iteration, 1e-3, 0.1, True)


def loss(value: float) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def test_micro_batches_are_averaged_and_flushed_together() -> None:
    recorder = LossRecorder(flush_iterations=2)
    recorder.add(loss(1.0))
    recorder.add(loss(3.0))
    assert recorder.end_iteration(step(1)) == []
    assert recorder.latest() == 2.0
    recorder.add(loss(5.0))
    arrived = recorder.end_iteration(step(2))
    arrived += recorder.flush(wait=True)  # from a GPU they arrive later
    assert [(done.iteration, done.loss) for done in arrived] == [(1, 2.0), (2, 5.0)]
    assert list(recorder.recent) == [2.0, 5.0]
    assert recorder.latest() == 5.0, "known also right after a flush"


def test_a_loss_that_the_loop_changes_in_place_stays_what_it_was() -> None:
    recorder, own = LossRecorder(flush_iterations=10), loss(4.0)
    recorder.add(own)
    own /= 2  # by the micro-batches of a step
    recorder.end_iteration(step(1))
    own += 7.0  # a sum over steps
    assert recorder.latest() == 4.0
    assert [done.loss for done in recorder.flush(wait=True)] == [4.0]


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    with stand_in_device() as made:
        made.at_once = False
        yield made


def test_losses_of_a_device_arrive_later_and_nothing_waits_for_them(device: StandInDevice) -> None:
    recorder = LossRecorder(flush_iterations=2)
    for iteration in range(1, 6):
        recorder.add(device.tensor(torch.tensor(float(iteration))))
        assert recorder.end_iteration(step(iteration)) == []
    assert recorder.flush() == []
    assert device.calls("synchronize") == []
    assert len(device.calls("record")) == 3, "one a flush"
    device.complete()
    recorder.add(device.tensor(torch.tensor(6.0)))
    recorder.end_iteration(step(6))
    arrived = recorder.flush()
    assert [(done.iteration, done.loss) for done in arrived] == [(n, float(n)) for n in range(1, 6)]


def test_a_checkpoint_has_the_losses_that_have_not_arrived(device: StandInDevice) -> None:
    recorder = LossRecorder(flush_iterations=2)
    recorder.restart([0.5])
    for iteration in range(1, 4):
        for share in (-0.25, 0.25):
            recorder.add(device.tensor(torch.tensor(iteration + share, dtype=torch.bfloat16)))
        recorder.end_iteration(step(iteration))
    recorder.flush()
    recorder.add(device.tensor(torch.tensor(4.0)))
    recorder.end_iteration(step(4))
    state = SmallState({"recent_losses": recorder.recent_so_far()})
    assert device.calls("synchronize") == []
    state.wait()
    assert state.tree() == {"recent_losses": [0.5, 1.0, 2.0, 3.0, 4.0]}
    for iteration in range(5, 3 * RECENT_LOSSES):
        recorder.add(device.tensor(torch.tensor(float(iteration))))
        recorder.end_iteration(step(iteration))
    assert len(recorder.recent_so_far()) == RECENT_LOSSES


def test_at_the_end_of_a_life_a_device_that_hangs_costs_the_losses_it_has(
    device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "ARRIVAL_SECONDS", 0.05)
    recorder = LossRecorder(flush_iterations=1)
    recorder.add(device.tensor(torch.tensor(1.0)))
    recorder.end_iteration(step(1))
    device.complete()
    device.hang()
    recorder.add(device.tensor(torch.tensor(2.0)))
    recorder.end_iteration(step(2))
    assert [done.iteration for done in recorder.flush(wait=True)] == []
    assert list(recorder.recent) == [1.0]
