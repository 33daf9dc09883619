"""A rank that is killed while its data loader's workers live: they outlive it, and its memory is taken over at once."""

import json
import multiprocessing
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from cpsr import CPSRRecovery
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.errors import RecoveryError
from tests.recovery.test_faults import INTERVAL, Loop, config


def lives(directory: Path, count: int) -> list[dict[str, Any]]:
    run_dir = directory / "run"
    command = [sys.executable, "-m", "tests.recovery.killed_lives", str(run_dir), str(count)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    remove_memory_states(run_id(run_dir))
    assert ended.returncode == 0, ended.stderr[-3000:]
    return [json.loads(line) for line in (directory / "lives.jsonl").read_text().splitlines()]


def assert_taken_over(records: list[dict[str, Any]]) -> None:
    assert [life["orphans"] for life in records] == [0] + [2] * (len(records) - 1)
    assert [life["messages"] for life in records] == [[]] * len(records)
    assert [life["sources"] for life in records] == [[]] + [["memory"]] * (len(records) - 1)
    started = [life["started"] for life in records]
    assert started[0] == 0
    # Training goes on while the disk takes the checkpoint that the life is killed at.
    assert all(later >= earlier + 2 * INTERVAL for earlier, later in pairwise(started))


def test_every_restart_takes_the_memory_over(tmp_path: Path) -> None:
    assert_taken_over(lives(tmp_path, 2))


@pytest.mark.slow
def test_many_restarts_in_a_row_take_it_over(tmp_path: Path) -> None:
    assert_taken_over(lives(tmp_path, 12))


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
