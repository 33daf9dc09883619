"""FSDP2 and tensor parallelism: killed, and back from the disk, from memory, from dumps and by prediction."""

import signal
from typing import Any

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.run_directory import run_id
from tests.device import cpu_only
from tests.recovery.job import RANKS, Ended, Job
from tests.recovery.test_memory import sources

pytestmark = cpu_only("FSDP2 and tensor parallelism are not tried over gloo with CUDA tensors")

CHECKPOINT, FAILURE = 20, 22
KILLED = [-signal.SIGKILL] * RANKS
IN_MEMORY = {"checkpoint": {"shared_memory": True}}
WORKER: dict[str, Any] = {"worker": "tests.recovery.elastic_worker", "batch_size": 6, "dropout": 0.1}


def assert_as_if_nothing_had_happened(back: Ended, job: Job, options: dict[str, Any], at: int) -> None:
    reference = Job(job.directory / "reference").launch(**options)
    assert back.statuses == reference.statuses == [0] * RANKS, back.output[0][-3000:]
    for rank in range(RANKS):
        mine, wanted = back.result(rank), reference.result(rank)
        assert mine["started"]["iteration"] == at
        assert mine["batches"] == [batch for batch in wanted["batches"] if batch[0] > at]
        for key in ("state", "draw", "scalars"):
            assert mine["ended"][key] == wanted["ended"][key], key


def test_all_ranks_are_killed_and_return_from_the_disk_bit_for_bit(job: Job) -> None:
    """Between two batches of a step, whose gradients are lost."""
    options: dict[str, Any] = {"kind": "fsdp2", **WORKER, "batch_size": 3}
    killed = job.launch(fault=f"micro:all:{FAILURE}", committed=CHECKPOINT, **options)
    assert killed.statuses == KILLED, killed.output
    back = job.launch(**options)
    assert sources(job) == [("disk", CHECKPOINT)] * RANKS
    assert_as_if_nothing_had_happened(back, job, options, CHECKPOINT)


def test_all_ranks_are_killed_and_return_from_memory_bit_for_bit(job: Job) -> None:
    """The snapshot of the iteration was not written yet."""
    options: dict[str, Any] = {"kind": "tp", **WORKER, "batch_size": 12}
    settings = {"checkpoint": {"shared_memory": True}, "memory": {"interval_iterations": 2}}
    killed = job.launch(fault=f"step:all:{FAILURE}", in_memory=FAILURE, settings=settings, **options)
    assert killed.statuses == KILLED, killed.output
    back = job.launch(settings=settings, **options)
    assert sources(job) == [("memory", FAILURE)] * RANKS
    assert_as_if_nothing_had_happened(back, job, options, FAILURE)


def test_with_replicas_a_dump_is_the_dead_ranks_state_too(job: Job) -> None:
    """Under FSDP2 only the slices of the dead rank are predicted; under HSDP its replica has left them."""
    options: dict[str, Any] = {"kind": "hsdp", **WORKER, "settings": IN_MEMORY, "mode": "predict"}
    killed = job.launch(fault=f"step:1:{FAILURE + 1}", committed=CHECKPOINT, **options)
    assert killed.statuses[1] == -signal.SIGKILL, killed.output
    back = job.launch(**options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert sources(job) == [("departure", FAILURE + 1)] * RANKS
    first, second = (back.result(rank) for rank in range(RANKS))
    for key in ("iteration", "method", "state"):
        assert first["started"][key] == second["started"][key], key


def test_what_ranks_hold_alike_is_predicted_alike(job: Job) -> None:
    """Of tensor parallelism: blocks on one rank each, and whole parameters on both, which one dump would set apart."""
    options: dict[str, Any] = {"mode": "predict", "settings": IN_MEMORY, "kind": "tp", **WORKER, "batch_size": 12}
    killed = job.launch(fault=f"step:1:{FAILURE}", committed=CHECKPOINT, **options)
    assert killed.statuses[1] == -signal.SIGKILL, killed.output
    left = [state.kind for state in Arena(run_id(job.run_dir)).list() if state.iteration == FAILURE]
    assert left == ["departure"]
    back = job.launch(**options)
    assert back.statuses == [0] * RANKS, back.output[0][-3000:]
    assert sources(job) == [("predicted", FAILURE)] * RANKS
    first, second = (back.result(rank)["started"] for rank in range(RANKS))
    assert first["replicas"] == second["replicas"] != {}
    assert first["state"] != second["state"]
    assert "the dumps of the ranks that did not fail are not used: rank 1 has lost its state" in back.output[0]


def test_another_split_is_refused_and_nothing_is_touched(job: Job) -> None:
    first = job.launch(iterations=5, kind="tp", **WORKER | {"batch_size": 12})
    assert first.statuses == [0] * RANKS, first.output
    before = (job.run_dir / "run.json").read_bytes()
    for kind in ("fsdp2", "hsdp"):
        refused = job.launch(iterations=8, kind=kind, **WORKER)
        assert refused.statuses == [1] * RANKS, refused.output
        for output in refused.output:
            assert "tensors are split over the ranks in another way: ranks [0, 1] hold other parts now" in output
    assert (job.run_dir / "run.json").read_bytes() == before
