"""A rank that is killed while its data loader's workers live: they outlive it, and its memory is taken over at once."""

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cpsr.checkpoint.rank_part as part_module
from cpsr import CPSRRecovery
from cpsr.checkpoint import files
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.manifest import saved_at
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import RecoveryError
from cpsr.journal import JournalReader
from tests.recovery.test_faults import INTERVAL, Loop, config
from tests.situations.lives import Life, live

WAIT_SECONDS = 60.0


def killed_when_written(run_dir: Path, at: int, orphans: Path) -> None:
    """Kill this process where the checkpoint of that iteration would be written, once memory holds it.

    Its workers are stopped: else they end by themselves within seconds.
    """
    write = files.write_tensors

    def writing(path: Path, *arguments: Any, **options: Any) -> Any:
        if saved_at(path.name) == at:
            end = time.monotonic() + WAIT_SECONDS
            while at not in [state.iteration for state in Arena(run_id(run_dir)).list()] and time.monotonic() < end:
                time.sleep(0.005)
            pids: list[int] = []
            while not pids and time.monotonic() < end:  # between two passes there are none
                pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
            orphans.write_text(" ".join(map(str, pids)))
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *arguments, **options)

    setattr(part_module, "write_tensors", writing)  # noqa: B010 - mypy refuses to assign to a function


def training(life: Life) -> list[int]:
    """Notes the orphans of the life before that are still alive, ends them, and is killed in its second checkpoint."""
    run_dir, orphans = life.directory / "run", life.directory / "orphans"
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, num_workers=2, persistent_workers=True)
    loop = Loop()
    with CPSRRecovery(loop.adapter, config(run_dir, checkpoint={"shared_memory": True})) as recovery:
        pids = [int(pid) for pid in orphans.read_text().split()] if orphans.exists() else []
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if life.options.get("last"):
            return [recovery.iteration, len(alive)]
        killed_when_written(run_dir, recovery.iteration + 2 * INTERVAL, orphans)
        (life.directory / f"{life.number}.began").write_text(f"{recovery.iteration} {len(alive)}")
        for inputs, targets in recovery.resume(loader, repeat=True):
            loop.step(loop.model(inputs, targets))
    raise AssertionError("the loop ended")


def test_every_restart_takes_the_memory_over(tmp_path: Path) -> None:
    lives = 2
    killed = [live(training, Life(tmp_path, number=number)) for number in range(lives)]
    assert [one.statuses for one in killed] == [[-signal.SIGKILL]] * lives, killed[-1].output
    last = live(training, Life(tmp_path, number=lives, options={"last": True})).result
    began = [[int(word) for word in (tmp_path / f"{number}.began").read_text().split()] for number in range(lives)]
    assert [orphans for _, orphans in [*began, last]] == [0] + [2] * lives
    # Training goes on while the disk takes the checkpoint that the life is killed at.
    assert began[0][0] == 0
    assert all(later >= earlier + 2 * INTERVAL for (earlier, _), (later, _) in pairwise([*began, last]))
    with JournalReader(tmp_path / "run" / "journal.db") as reader:
        assert [[source.source for source in row.sources] for row in reader.recoveries()] == [["memory"]] * lives
        assert "no shared memory" not in [event.kind for event in reader.events()]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def test_workers_end_with_the_recovery_and_not_as_garbage(tmp_path: Path) -> None:
    with CPSRRecovery(Loop().adapter, config(tmp_path)) as recovery:
        stream = recovery.resume(DataLoader(Numbers(), num_workers=1), repeat=True)
        next(stream)
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()
    with pytest.raises(RecoveryError, match="is closed"):
        next(stream)
