"""A restart must not count steps that were still queued on the device."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cpsr.checkpoint.device import EVENTS, StepEvents
from cpsr.checkpoint.progress import ProgressCounter, progress_path, read_progress
from cpsr.life.step_boundary import Publication
from cpsr.state.device_values import DeviceNumber
from tests.stand_in_device import StandInDevice, StandInEvent, stand_in_device

GPU = torch.device("cuda", 0)
BATCHES = 3  # a step


class Training:
    """A host that launches steps, and a device that completes them later."""

    def __init__(self, device: StandInDevice, run_dir: Path) -> None:
        self.device, self.run_dir = device, run_dir
        self.events = StepEvents(GPU)
        updates = StepEvents(GPU, EVENTS + 1)
        self.publication = Publication(ProgressCounter(progress_path(run_dir, 0)), self.events, updates)
        self.publication.reset(0, 0)
        self.launched = self.completed = self.begun = self.reached = 0

    def launch(self) -> None:
        """A backward, for which the device waits until `begun`, and an update, until `completed`."""
        small = {"launched": self.launched, "counts": [self.launched], "number": DeviceNumber(torch.tensor(0.0))}
        self.publication.before_update(lambda: small)
        self.launched += 1
        step = self.launched
        stream = self.device.default_stream()
        self.device.enqueue(stream, lambda: max(self.begun, self.completed) >= step)
        self.publication.begin_update()
        self.device.enqueue(stream, lambda: self._reach(step))
        self.device.enqueue(stream, lambda: self.completed >= step)
        small["counts"].append(step)  # type: ignore[attr-defined] # as an engine goes on
        self.publication.step(step, BATCHES * step, self.events.record())

    def _reach(self, update: int) -> bool:
        self.reached = max(self.reached, update)
        return True

    def begin(self, step: int) -> None:
        """The device begins the update of this step."""
        self.begun = max(self.begun, min(step, self.launched))
        self.device.complete()

    def complete(self, step: int) -> None:
        self.completed = max(self.completed, min(step, self.launched))
        self.device.complete()

    @property
    def published(self) -> dict[int, int]:
        progress = read_progress(self.run_dir, 1)
        assert progress is not None
        return progress.ranks[0]


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    with stand_in_device() as device:
        device.at_once = False
        yield device


@pytest.fixture
def training(device: StandInDevice, tmp_path: Path) -> Training:
    return Training(device, tmp_path)


@pytest.mark.parametrize("seed", range(5))
def test_no_step_is_published_before_the_device_has_completed_it(training: Training, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        before = max(training.published)
        action = draw.choice(["launch", "complete", "poll"])
        if action == "launch":
            training.launch()
        elif action == "complete":
            training.complete(training.completed + draw.randint(0, 3))
        else:
            training.publication.poll()
            if training.launched - training.completed < EVENTS - 3:
                assert max(training.published) == training.completed
        published = training.published
        assert before <= max(published) <= training.completed
        assert all(batches == BATCHES * iteration for iteration, batches in published.items())
    assert training.device.calls("synchronize", "wait_event") == []
    assert len(training.device.calls("record")) == 2 * training.launched
    assert len({event for _, _, event in training.device.calls("record")}) <= 2 * EVENTS + 1


@pytest.mark.parametrize("lead", [EVENTS - 1, EVENTS, 3 * EVENTS])
def test_a_host_that_stays_ahead_by_any_number_of_steps_still_publishes(training: Training, lead: int) -> None:
    for _ in range(10 * lead):
        training.launch()
        training.complete(training.launched - lead)
        training.publication.poll()
        assert training.launched - 2 * lead - 1 <= max(training.published) <= training.completed
    training.complete(training.launched)
    training.publication.poll()
    assert max(training.published) == training.launched


def test_steps_that_are_pending_lead_elsewhere_after_a_rewind(training: Training) -> None:
    for _ in range(EVENTS + 2):
        training.launch()
    training.publication.reset(2, 6)
    training.launched = 2
    training.complete(2)
    training.device.complete()
    training.publication.poll()
    assert training.published == {2: 6}
    training.launch()
    training.completed = EVENTS + 2  # the work of the branch that was given up is done, too
    training.device.complete()
    training.publication.poll()
    assert training.published == {2: 6, 3: 9}


def test_the_end_of_a_life_waits_for_the_device_within_a_limit(training: Training) -> None:
    training.launch()
    threading.Timer(0.1, lambda: training.complete(1)).start()
    training.publication.close(60.0)
    assert training.published == {0: 0, 1: 3}


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_a_device_that_hangs_does_not_keep_a_life_from_ending(training: Training, seconds: float) -> None:
    training.launch()
    started = time.monotonic()
    training.publication.close(seconds)
    assert time.monotonic() - started < seconds + 30
    assert training.published == {0: 0}
    training.publication.poll()  # a dump on another thread may still come


def test_a_device_that_has_failed_leaves_what_was_published(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: StandInEvent) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    training.launch()
    monkeypatch.setattr(StandInEvent, "query", fails)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        training.publication.poll()
    training.publication.close(60.0)
    assert "the device has failed, and its last 1 steps do not count: an illegal memory access" in caplog.text
    assert training.published == {0: 0}


def test_the_training_thread_waits_for_no_answer_of_the_device(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it ends a step, nor when it goes back: what was asked for then is not published."""
    asked, answer = threading.Event(), threading.Event()

    def query(event: StandInEvent) -> bool:
        asked.set()
        return answer.wait(60)

    training.launch()
    monkeypatch.setattr(StandInEvent, "query", query)
    first = threading.Thread(target=training.publication.poll)
    first.start()
    assert asked.wait(60)
    training.launch()
    training.publication.reset(0, 0)
    monkeypatch.undo()
    answer.set()
    first.join()
    assert training.published == {0: 0}


@pytest.mark.parametrize("seed", range(10))
def test_the_earlier_step_is_what_the_device_holds_until_it_is_overtaken(training: Training, seed: int) -> None:
    draw, found, kept = random.Random(seed), 0, None
    for _ in range(300):
        action = draw.choice(["launch", "launch", "begin", "complete", "poll"])
        if action == "launch":
            training.launch()
        elif action == "begin":
            training.begin(training.completed + draw.randint(0, 2))
        elif action == "complete":
            training.complete(training.completed + draw.randint(0, 3))
        else:
            kept = training.publication.earlier() or kept  # a dump that takes its time
        for earlier in (training.publication.earlier(), kept):
            if earlier is not None and not earlier.overtaken():
                found += 1
                assert training.reached == earlier.iteration, "no later update has begun on the device"
                assert earlier.scalars["launched"] == earlier.iteration
                assert earlier.scalars["counts"] == [earlier.iteration]
    assert found > 20
    assert training.device.calls("synchronize", "wait_event") == []


def test_a_small_state_on_the_device_is_not_copied_behind_what_hangs(training: Training) -> None:
    """Such as a learning rate in a tensor: one look, and no more in this life."""
    training.launch()
    training.complete(1)
    asked = []

    def small() -> object:
        asked.append(1)
        return {"lr": training.device.tensor(torch.tensor(1e-3))}

    for _ in range(2):
        training.publication.before_update(small)
        training.publication.begin_update()
        training.publication.step(2, 6, training.events.record())
    assert asked == [1]
    assert training.publication.earlier() is None
