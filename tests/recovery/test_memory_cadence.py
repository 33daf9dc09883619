"""Snapshots to host memory between checkpoints: killed processes lose a few iterations, exactly."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.journal.reader import JournalReader
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import Job
from tests.recovery.test_memory import run_id, sources

CHECKPOINT_ITERATION = 20


def settings(interval_iterations: int) -> dict[str, Any]:
    return {
        "checkpoint": {"shared_memory": True, "interval_iterations": CHECKPOINT_ITERATION},
        "memory": {"interval_iterations": interval_iterations},
    }


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    remove_memory_states(run_id(job))


@pytest.mark.parametrize(
    ("mode", "interval_iterations", "fault"),
    [
        ("exact", 1, "step:all:27"),
        ("exact", 3, "step:all:28"),
        ("exact", 1, "snapshot:all:27"),
        ("exact", 3, "snapshot:all:26"),
        ("auto", 3, "snapshot:all:26"),
        ("auto", 3, "snapshot:1:26"),  # the other rank has sealed it, and dumps its state
    ],
)
def test_when_all_processes_are_killed_as_many_iterations_are_lost_at_most(
    job: Job, uninterrupted: Uninterrupted, mode: str, interval_iterations: int, fault: str
) -> None:
    killed = job.launch(mode, fault=fault, committed=20, settings=settings(interval_iterations))
    assert killed.statuses[1] == -signal.SIGKILL
    assert (killed.statuses[0] == -signal.SIGKILL) == (":all:" in fault)
    back = job.launch(mode, settings=settings(interval_iterations))
    assert back.statuses == [0, 0], back.output[0][-3000:]
    found = sources(job)
    assert {tier for tier, _ in found} == {"memory"}
    (at,) = {iteration for _, iteration in found}
    with JournalReader(job.run_dir / "journal.db") as reader:
        failure = reader.recoveries()[-1].failure_iteration
    assert failure is not None
    assert failure - at <= interval_iterations
    for rank in range(2):
        mine, reference = back.result(rank), uninterrupted().result(rank)
        assert mine["started"]["iteration"] == at
        assert mine["batches"] == reference["batches"][at:]
        assert {key: mine[key] for key in ("state", "rng", "counters")} == {
            key: reference[key] for key in ("state", "rng", "counters")
        }
