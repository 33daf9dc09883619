"""A PipelineModule whose data iterator is `recovery.resume(loader)`: a stage killed, and the job brought back."""

from typing import Any

import pytest

from cpsr.journal import JournalReader
from tests.device import NO_STAGES, cpu_only
from tests.recovery.conftest import Killed, Uninterrupted
from tests.recovery.job import ITERATIONS, Job
from tests.recovery.test_memory import IN_MEMORY, sources

pytestmark = cpu_only(NO_STAGES)

CHECKPOINT, FAILURE, MICRO_BATCHES = 20, 23, 2
PIPELINE: dict[str, Any] = {"zero": 0, "micro_batches": MICRO_BATCHES}


def killed_at_stage_1(killed: Killed, stages: int) -> None:
    killed(fault=f"step:1:{FAILURE}", committed=CHECKPOINT, ranks=stages, stages=stages, **PIPELINE)


def guard_of(job: Job) -> dict[str, Any]:
    with JournalReader(job.run_dir / "journal.db") as journal:
        recovery = journal.latest_recovery()
    assert recovery is not None
    return dict(recovery.guard)


def test_exact_is_bitwise(job: Job, killed: Killed, uninterrupted: Uninterrupted) -> None:
    stages = 3
    killed_at_stage_1(killed, stages)
    back = job.launch(ranks=stages, stages=stages, **PIPELINE)
    reference = uninterrupted(ranks=stages, stages=stages, **PIPELINE)
    back.require_rest_of(reference, CHECKPOINT, MICRO_BATCHES)
    # The stage in the middle loads nothing.
    dealt = [len(reference.result(rank)["batches"]) for rank in range(stages)]
    assert dealt == [0 if 0 < rank < stages - 1 else ITERATIONS * MICRO_BATCHES for rank in range(stages)]


# What the user gives for the loss veto -> what the guard notes of it.
VETO = {
    "with loss_fn": "nats",
    "without loss_fn": "a pipeline's loss exists on its last stage only",
}


@pytest.mark.parametrize(("stages", "probes"), [(3, "with loss_fn"), (2, "without loss_fn")])
def test_prediction(job: Job, killed: Killed, uninterrupted: Uninterrupted, stages: int, probes: str) -> None:
    killed_at_stage_1(killed, stages)
    back = job.launch(mode="predict", ranks=stages, stages=stages, probes=probes, **PIPELINE)
    assert back.statuses == [0] * stages, back.output[0][-3000:]
    reference = uninterrupted(ranks=stages, stages=stages, **PIPELINE)
    for rank in range(stages):
        mine = back.result(rank)
        assert (mine["started"]["iteration"], mine["started"]["method"]) == (FAILURE, "line")
        assert mine["batches"] == reference.result(rank)["batches"][FAILURE * MICRO_BATCHES :]
        assert mine["iteration"] == ITERATIONS
    loss = guard_of(job)["loss"]
    assert loss["accepted"] is True
    assert VETO[probes] in loss["reason"]
    assert ("loss_checkpoint" in loss) == (probes == "with loss_fn")


def test_a_vetoed_prediction_is_undone_on_every_stage(job: Job, killed: Killed, uninterrupted: Uninterrupted) -> None:
    killed_at_stage_1(killed, 2)
    strict = {"restart": {"loss_tolerance_nats": 1e-9}}
    back = job.launch(mode="predict", ranks=2, stages=2, probes="reversed", settings=strict, **PIPELINE)
    assert back.statuses == [0, 0], back.output[0][-3000:]
    assert guard_of(job)["loss"]["accepted"] is False
    for rank in range(2):
        exact = uninterrupted(ranks=2, stages=2, **PIPELINE).result(rank)
        assert "vetoed" in back.result(rank)["started"]["reason"]
        assert back.result(rank)["state"] == exact["state"]


def test_a_rank_that_is_lost_takes_what_another_of_its_stage_has_left(job: Job, uninterrupted: Uninterrupted) -> None:
    """Two stages of two ranks each, which hold the same without ZeRO: nothing has to be predicted."""
    four: dict[str, Any] = {"ranks": 4, "stages": 2, "zero": 0}
    ended = job.launch("auto", fault=f"step:1:{FAILURE}", committed=CHECKPOINT, settings=IN_MEMORY, **four)
    assert ended.statuses[1] == -9, ended.output
    back = job.launch("auto", settings=IN_MEMORY, **four)
    assert back.statuses == [0] * 4, back.output[0][-3000:]
    assert sources(job) == [("departure", FAILURE)] * 4
    reference = uninterrupted(iterations=FAILURE, **four)
    for rank in range(4):
        assert back.result(rank)["state_at_start"] == reference.result(rank)["state"]
