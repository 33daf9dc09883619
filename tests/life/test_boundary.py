"""What a life publishes of its steps while the device is behind the host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr import CPSRRecovery
from cpsr.checkpoint.device import DeviceSteps, StepEvents
from cpsr.checkpoint.progress import read_progress
from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.journal import RankJournal
from cpsr.life.life import Life
from tests.recovery.test_faults import CrashError, Loop, config, loader
from tests.stand_in_device import StandInDevice, stand_in_device

SIGNS = ("on_forward", "on_loss", "before_update", "after_step")


class Queue:
    """A device that completes a step when the test says so."""

    def __init__(self, device: StandInDevice) -> None:
        self.device = device
        self.completed = 0

    def launch(self, step: int) -> None:
        self.device.enqueue(self.device.default_stream(), lambda: self.completed >= step)

    def complete(self, step: int) -> None:
        self.completed = max(self.completed, step)
        self.device.complete()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """The state is on the host, the events of its steps are the device's."""
    original = DeviceSteps.__init__

    def with_events(steps: DeviceSteps, *given: Any) -> None:
        original(steps, *given)
        steps.events = StepEvents(torch.device("cuda", 0))

    with stand_in_device() as device:
        device.at_once = False
        monkeypatch.setattr(DeviceSteps, "__init__", with_events)
        yield Queue(device)


def published(run_dir: Path) -> dict[int, int]:
    progress = read_progress(run_dir, 1)
    assert progress is not None
    return progress.ranks[0]


def train(recovery: CPSRRecovery, loop: Loop, queue: Queue, until: int) -> Iterator[int]:
    """Steps whose work stays queued."""
    for x, y in recovery.resume(loader(), repeat=True):
        queue.launch(recovery.iteration + 1)
        loop.step(loop.model(x, y))
        yield recovery.iteration
        if recovery.iteration >= until:
            break


def crash_at_5(run_dir: Path, queue: Queue, completed: int, **checkpoint: Any) -> None:
    """A life whose device has completed only so many steps by then."""
    loop, settings = Loop(device="cpu"), config(run_dir, checkpoint={"interval_iterations": 100, **checkpoint})

    def life() -> None:
        for iteration in train(recovery, loop, queue, 12):
            queue.complete(min(iteration, completed))
            if iteration == 5:
                raise CrashError

    with pytest.raises(CrashError), CPSRRecovery(loop.adapter, settings) as recovery:
        life()


def test_no_hook_publishes_a_step_that_is_still_queued(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int]] = []
    for name in SIGNS:
        original = getattr(Life, name)

        def watched(life: Life, *given: Any, _name: str = name, _original: Any = original) -> None:
            _original(life, *given)
            seen.append((_name, max(published(tmp_path)), queue.completed))

        monkeypatch.setattr(Life, name, watched)
    loop = Loop(device="cpu")
    with CPSRRecovery(loop.adapter, config(tmp_path, checkpoint={"interval_iterations": 100})) as recovery:
        for iteration in train(recovery, loop, queue, 12):
            if iteration % 4 == 0:
                queue.complete(iteration - 1)
        assert recovery.iteration == 12
        assert {name for name, _, _ in seen} == set(SIGNS)
        assert all(counted <= completed for _, counted, completed in seen)
        # Each of them looks: at the forward after it, a step that was complete is published.
        assert [one for one in seen if one[0] == "on_forward"][-1] == ("on_forward", 7, 7)
        assert published(tmp_path) == {6: 6, 7: 7}, "batches go with their step"
        assert queue.device.calls("synchronize", "wait_event") == []
        queue.complete(12)
    assert max(published(tmp_path)) == 12


def test_a_dump_publishes_its_step_before_it_reports_success(
    tmp_path: Path, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_event: dict[str, int] = {}
    dump, event = SnapshotPool.dump, RankJournal.event

    def dump_waits(pool: SnapshotPool, shard: Any, iteration: int, scalars: Any, earlier: Any, frozen: Any) -> int:
        queue.complete(iteration)  # what it waits for
        return dump(pool, shard, iteration, scalars, earlier, frozen)

    def reported(journal: RankJournal, kind: str, *given: Any, **more: Any) -> None:
        if kind == "dumped":
            at_event[kind] = max(published(tmp_path))
        event(journal, kind, *given, **more)

    monkeypatch.setattr(SnapshotPool, "dump", dump_waits)
    monkeypatch.setattr(RankJournal, "event", reported)
    crash_at_5(tmp_path, queue, completed=0, shared_memory=True)
    assert at_event["dumped"] == 5
    assert published(tmp_path) == {4: 4, 5: 5}


def test_a_crash_without_a_dump_leaves_what_the_device_had_completed(tmp_path: Path, queue: Queue) -> None:
    crash_at_5(tmp_path, queue, completed=3)
    assert max(published(tmp_path)) == 3
