"""A rank is a process of its own that has imported the product and yet sees the shared memory of its machine."""

import json
import os
from importlib import import_module
from pathlib import Path

import pytest

from cpsr.benchmarks.harness.ranks import become_rank, start_ranks
from cpsr.checkpoint.memory_states import SHARED_MEMORY

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "DS_ACCELERATOR")


def note(directory: Path, rank: int, ranks: int) -> None:
    become_rank(directory / f"{rank}.log", rank, ranks, directory / "machine" if rank == 1 else None)
    memory = import_module("cpsr.checkpoint.memory").SHARED_MEMORY
    node = import_module("cpsr.ranks.group").this_node()
    environment = [os.environ[name] for name in NAMES]
    print(json.dumps([str(memory), node, environment]))  # noqa: T201 - to its log


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_have_their_environment_log_and_memory(tmp_path: Path, device: str) -> None:
    processes = start_ranks(note, tmp_path, 2, device)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.log").read_text()) for rank in range(2))
    assert (first[0], first[2]) == (str(SHARED_MEMORY), ["0", "0", "2", "1", device])
    assert second == [str(tmp_path / "machine"), "machine", ["1", "1", "2", "1", device]]
    assert first[1] != "machine"
