"""Events of step boundaries come from a fixed set, and are recorded where the state is."""

from collections.abc import Iterator

import pytest
import torch

from cpsr.checkpoint.step_events import EVENTS, StepEvents
from tests.stand_in_device import StandInDevice, StandInStream, stand_in_device

GPU = torch.device("cuda", 1)


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    with stand_in_device(2) as device:
        yield device


def test_they_are_recorded_on_the_current_stream_of_the_states_device(device: StandInDevice) -> None:
    events = StepEvents(GPU)
    assert device.current_device() == 0, "nobody called set_device"
    events.record()
    own = StandInStream(1, of=device)
    with device.on_stream(own):
        events.record()
    assert [stream for _, stream, _ in device.calls("record")] == ["default:1", own.name]


def test_no_step_makes_a_new_one(device: StandInDevice) -> None:
    events = StepEvents(GPU)
    assert len({id(events.record()) for _ in range(5 * EVENTS)}) == EVENTS


def test_a_held_event_marks_its_boundary_until_it_is_released(device: StandInDevice) -> None:
    events = StepEvents(GPU)
    held = events.record()
    events.hold(held)
    assert all(events.record() is not held for _ in range(3 * EVENTS))
    events.release(held)
    assert held in [events.record() for _ in range(EVENTS)]


def test_where_all_are_held_the_newest_moves_on(device: StandInDevice) -> None:
    events, held = StepEvents(GPU), []
    for _ in range(EVENTS):
        held.append(events.record())
        events.hold(held[-1])
    assert events.record() is events.newest is held[-1]
    events.release(held[0])
    assert events.record() is events.newest is held[0]


def test_a_boundary_follows_an_update_on_another_stream(device: StandInDevice) -> None:
    """As in a loop that trains within `torch.cuda.stream`, and calls its scheduler outside."""
    events, own = StepEvents(GPU), StandInStream(1, of=device)
    with device.on_stream(own):
        events.updating()
        device.hang(own)
    assert not events.reached(events.record()), "the update is not complete"
    assert events.stream is not None
    assert [stream for kind, stream, _ in device.trace if kind == "wait_event"] == ["default:1"]


def test_on_one_stream_nothing_waits_for_the_update(device: StandInDevice) -> None:
    events = StepEvents(GPU)
    events.updating()
    events.record()
    assert device.calls("wait_event") == []
