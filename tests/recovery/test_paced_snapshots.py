"""Pipelines whose snapshots are copied while a stage waits for its neighbour: restored bit for bit."""

import json
from typing import Any

from tests.device import NO_STAGES, cpu_only
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import OF_THE_START, Ended, Job

pytestmark = cpu_only(NO_STAGES)

CHECKPOINT, FAILURE, STAGES = 20, 23, 2
PIPELINE: dict[str, Any] = {"zero": 0, "micro_batches": 2, "ranks": STAGES, "stages": STAGES}
WORKER = "tests.recovery.paced_worker"


def splits(job: Job, life: int) -> list[list[dict[str, int]]]:
    """Of each stage, when its snapshots were copied."""
    files = [job.directory / f"life-{life}.{rank}.splits" for rank in range(STAGES)]
    return [json.loads(file.read_text()) for file in files]


def same_end(back: Ended, uninterrupted: Uninterrupted, **apart: Any) -> None:
    assert back.statuses == [0] * STAGES, back.output[0][-3000:]
    for rank in range(STAGES):
        mine, reference = back.result(rank), uninterrupted(**PIPELINE).result(rank)
        assert {**mine, **OF_THE_START, **apart} == {**reference, **OF_THE_START, **apart}


def test_snapshots_in_waits_are_restored_bitwise(job: Job, uninterrupted: Uninterrupted) -> None:
    killed = job.launch(fault=f"step:1:{FAILURE}", committed=CHECKPOINT, worker=WORKER, **PIPELINE)
    assert killed.statuses[1] == -9, killed.output
    back = job.launch(worker=WORKER, **PIPELINE)
    same_end(back, uninterrupted)
    assert back.result()["started"]["iteration"] == CHECKPOINT
    job.launch(iterations=60, worker=WORKER, **PIPELINE)
    assert any(split["in_waits"] for stage in splits(job, life=3) for split in stage)
