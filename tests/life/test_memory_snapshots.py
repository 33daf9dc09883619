"""Snapshots to host memory: due by the plan, skipped without waiting, and never silent."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsr import CPSRRecovery
from cpsr.checkpoint.arena import Arena
from cpsr.journal.reader import JournalReader
from cpsr.ranks.sends import Order, Sender
from tests.recovery.test_faults import Loop, config, loader

NEVER = 1000


@contextmanager
def training(run_dir: Path, every: int | None, **checkpoint: Any) -> Iterator[tuple[CPSRRecovery, Iterator[int]]]:
    """A run, and its steps; snapshots in memory come so often, checkpoints never."""
    loop = Loop(device="cpu")
    options = {"interval_iterations": NEVER, "shared_memory": True, **checkpoint}
    with CPSRRecovery(
        loop.adapter, config(run_dir, checkpoint=options, memory={"interval_iterations": every})
    ) as recovery:

        def steps() -> Iterator[int]:
            for x, y in recovery.resume(loader(), repeat=True):
                yield recovery.iteration
                loop.step(loop.model(x, y))
                recovery.life.saver.pool.settle()

        yield recovery, steps()


def train(recovery: CPSRRecovery, steps: Iterator[int], until: int) -> None:
    for iteration in steps:
        if iteration >= until:
            recovery.life.saver.finish()
            recovery.life.saver.pool.settle()
            break


def in_memory(recovery: CPSRRecovery) -> list[int]:
    return recovery.life.saver.pool.occupancy.sealed_iterations


def events(run_dir: Path) -> list[str]:
    with JournalReader(run_dir / "journal.db") as journal:
        return [event.kind for event in journal.events() if event.kind.startswith("memory snapshot")]


def test_one_is_taken_every_interval_and_the_newest_stay(tmp_path: Path) -> None:
    with training(tmp_path, 3) as (recovery, steps):
        train(recovery, steps, 17)
        assert in_memory(recovery) == [9, 12, 15]
        assert (recovery.life.saver.memory.taken, recovery.life.saver.memory.skipped) == (5, 0)
        newest = max(Arena(recovery.life.job.run.run_id).list(), key=lambda state: state.iteration)
        assert newest.iteration == 15
    assert events(tmp_path) == []


def test_none_is_taken_without_shared_memory(tmp_path: Path) -> None:
    with training(tmp_path, 3, shared_memory=False) as (recovery, steps):
        train(recovery, steps, 10)
        assert recovery.life.saver.memory.taken == 0


def test_where_the_disk_has_the_other_buffers_snapshots_are_late_and_that_is_reported_once(tmp_path: Path) -> None:
    with training(tmp_path, 3) as (recovery, steps):
        saver = recovery.life.saver
        written = [saver.pool.acquire(iteration) for iteration in (1, 2)]
        train(recovery, steps, 8)
        assert in_memory(recovery) == [3]
        assert (saver.memory.taken, saver.memory.skipped) == (1, 1)
        for one in written:
            assert one is not None
            saver.pool.release(one)
        train(recovery, steps, 11)
        assert saver.memory.taken == 2
    assert events(tmp_path) == ["memory snapshot skipped"]


def test_a_state_that_cannot_be_saved_is_reported_once_and_training_goes_on(tmp_path: Path) -> None:
    with training(tmp_path, 3) as (recovery, steps):
        kept: dict[str, Any] = {"plain": torch.zeros(1)}
        recovery.register("kept", kept)
        kept["plain"] = object()
        train(recovery, steps, 8)
        assert recovery.life.saver.memory.taken == 0
        kept["plain"] = torch.zeros(1)
        train(recovery, steps, 11)
        assert recovery.life.saver.memory.taken == 1
    assert events(tmp_path) == ["memory snapshot failed"]


@pytest.mark.parametrize("steps_per_batch", [1, 2, 3, 4])
def test_windows_that_begin_at_the_last_step_on_a_batch_go_to_the_peers(steps_per_batch: int, tmp_path: Path) -> None:
    loop, sealed, sent = Loop(device="cpu"), list[int](), list[int]()
    options, windows_of_one = (
        {"interval_iterations": NEVER, "shared_memory": True},
        {"enabled": True, "window_iterations": 1},
    )

    def follow(path: Path, iteration: int, *, send: bool) -> None:
        (sent if send else sealed).append(iteration)

    with CPSRRecovery(loop.adapter, config(tmp_path, checkpoint=options, replay=windows_of_one)) as recovery:
        windows = recovery.life.memory.windows
        assert windows is not None
        windows.recorder.on_sealed, sender = follow, Sender(lambda: recovery.iteration)
        recovery.life.saver.memory.send_by(sender)
        for x, y in recovery.resume(loader(), repeat=True):
            for _ in range(steps_per_batch):
                loop.step(loop.model(x, y))
                done, arrived = sender.report()
                sender.hear(Order(done + 1, recovery.iteration + 1, complete=arrived))
            if recovery.iteration >= 60:
                break
    assert {iteration % steps_per_batch for iteration in sealed + sent} == {0}
    assert len(sent) >= 60 / steps_per_batch / 3
