"""FSDP2 and tensor parallelism: killed, and back from the disk, from memory, from dumps and by prediction."""

import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.memory_states import memory_states
from cpsr.checkpoint.run_directory import run_id
from cpsr.journal import JournalReader
from tests.device import cpu_only
from tests.recovery.job import ITERATIONS, RANKS, Ended, Job

pytestmark = cpu_only("FSDP2 and tensor parallelism are not tried over gloo with CUDA tensors")

CHECKPOINT, FAILURE = 20, 22
KILLED = [-signal.SIGKILL] * RANKS
IN_MEMORY = {"checkpoint": {"shared_memory": True}}
WORKER: dict[str, Any] = {"worker": "tests.recovery.sharded_worker"}
KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"kind": "fsdp2", "accumulating": True},
    "bf16": {"kind": "bf16"},
    "tp": {"kind": "tp"},
}


Reference = Callable[[str], Ended]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The job that nothing happened to, which is run once for a kind."""

    @functools.cache
    def of(kind: str) -> Ended:
        ended = Job(tmp_path_factory.mktemp(kind)).launch(**KINDS[kind], **WORKER)
        assert ended.statuses == [0] * RANKS, ended.output[0][-3000:]
        return ended

    return of


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    remove_memory_states(run_id(job.run_dir))


def sources(job: Job) -> list[tuple[str, int]]:
    """Of the newest recovery: where each rank's state came from."""
    with JournalReader(job.run_dir / "journal.db") as reader:
        return [(source.source, source.iteration) for source in reader.recoveries()[-1].sources]


def assert_as_if_nothing_had_happened(back: Ended, reference: Ended, at: int, parts: int) -> None:
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    for rank in range(RANKS):
        mine, wanted = back.result(rank), reference.result(rank)
        assert mine["started"]["iteration"] == at
        assert mine["batches"] == wanted["batches"][at * parts :]
        assert mine["final"] == wanted["final"]


@pytest.mark.parametrize("kind", ["fsdp2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bf16", "tp"))])
def test_all_ranks_are_killed_and_return_from_the_disk_bit_for_bit(job: Job, reference: Reference, kind: str) -> None:
    parts = 2 if "accumulating" in KINDS[kind] else 1
    phase = "micro" if parts == 2 else "step"  # between two batches of a step, whose gradients are lost
    killed = job.launch(fault=f"{phase}:all:{FAILURE}", committed=CHECKPOINT, **KINDS[kind], **WORKER)
    assert killed.statuses == KILLED, killed.output
    back = job.launch(**KINDS[kind], **WORKER)
    assert sources(job) == [("disk", CHECKPOINT)] * RANKS
    assert_as_if_nothing_had_happened(back, reference(kind), CHECKPOINT, parts)


@pytest.mark.parametrize("kind", ["tp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_all_ranks_are_killed_and_return_from_memory_bit_for_bit(job: Job, reference: Reference, kind: str) -> None:
    """The snapshot of the iteration was not written yet."""
    options: dict[str, Any] = {**KINDS[kind], **WORKER}
    settings = {"checkpoint": {"shared_memory": True}, "memory": {"interval_iterations": 2}}
    killed = job.launch(fault=f"step:all:{FAILURE}", in_memory=FAILURE, settings=settings, **options)
    assert killed.statuses == KILLED, killed.output
    back = job.launch(settings=settings, **options)
    assert sources(job) == [("memory", FAILURE)] * RANKS
    assert_as_if_nothing_had_happened(back, reference(kind), FAILURE, 2 if "accumulating" in options else 1)


def test_with_replicas_a_dump_is_the_dead_ranks_state_too(job: Job) -> None:
    """Under FSDP2 only the slices of the dead rank are predicted; under HSDP its replica has left them."""
    options: dict[str, Any] = {"kind": "hsdp", **WORKER, "settings": IN_MEMORY, "mode": "predict"}
    killed = job.launch(fault=f"step:1:{FAILURE + 1}", committed=CHECKPOINT, **options)
    assert killed.statuses[1] == -signal.SIGKILL, killed.output
    back = job.launch(**options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert sources(job) == [("departure", FAILURE + 1)] * RANKS
    first, second = (back.result(rank) for rank in range(RANKS))
    assert first["started"] == second["started"]


def test_a_dead_ranks_slices_are_predicted_beside_the_dump_of_the_other(job: Job) -> None:
    options: dict[str, Any] = {"kind": "fsdp2", **WORKER, "settings": IN_MEMORY, "mode": "predict"}
    killed = job.launch(fault=f"step:1:{FAILURE + 1}", committed=CHECKPOINT, **options)
    assert killed.statuses[1] == -signal.SIGKILL, killed.output
    back = job.launch(**options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert sources(job) == [("departure", FAILURE + 1), ("predicted", FAILURE + 1)]
    assert back.result()["started"]["method"] == "line"
    assert back.result()["final"]["iteration"] == ITERATIONS


@pytest.mark.parametrize("victims", ["1", pytest.param("all", marks=pytest.mark.slow)])
def test_what_ranks_hold_alike_is_predicted_alike(job: Job, victims: str) -> None:
    """Of tensor parallelism: blocks on one rank each, and whole parameters on both, which one dump would set apart."""
    options: dict[str, Any] = {"mode": "predict", "settings": IN_MEMORY, **KINDS["tp"], **WORKER}
    killed = job.launch(fault=f"step:{victims}:{FAILURE}", committed=CHECKPOINT, **options)
    assert killed.statuses[1] == -signal.SIGKILL, killed.output
    left = [state.kind for state in memory_states(run_id(job.run_dir)) if state.iteration == FAILURE]
    assert left == ([] if victims == "all" else ["departure"])
    back = job.launch(**options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert sources(job) == [("predicted", FAILURE)] * RANKS
    first, second = (back.result(rank)["started"] for rank in range(RANKS))
    assert first["replicas"] == second["replicas"] != "{}"
    assert first["state"] != second["state"]
    noted = "the dumps of the ranks that did not fail are not used: rank 1 has lost its state" in back.output[0]
    assert noted == (victims == "1")


def test_another_split_is_refused_and_nothing_is_touched(job: Job) -> None:
    first = job.launch(iterations=5, **KINDS["tp"], **WORKER)
    assert first.statuses == [0] * RANKS, first.output
    before = (job.run_dir / "run.json").read_bytes()
    for kind in ("fsdp2", "hsdp"):
        refused = job.launch(iterations=8, kind=kind, **WORKER)
        assert refused.statuses == [1] * RANKS, refused.output
        for output in refused.output:
            assert "tensors are split over the ranks in another way: ranks [0, 1] hold other parts now" in output
    assert (job.run_dir / "run.json").read_bytes() == before
