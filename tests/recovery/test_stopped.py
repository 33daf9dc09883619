"""Ranks whose peers do not learn from their collectives that something is wrong."""

from cpsr.journal import JournalReader
from cpsr.ranks.emergency_dump import LEFT_EXIT_STATUS
from tests.recovery.conftest import Uninterrupted
from tests.recovery.job import Job

HEARD = {"ranks": {"heartbeat_timeout_seconds": 2.0}, "checkpoint": {"shared_memory": True}}
AT = 14


def test_the_others_leave_and_the_job_goes_on(job: Job, uninterrupted: Uninterrupted) -> None:
    # The launcher ends the one that is stopped, once the other has left.
    left = job.launch(fault=f"stop:1:{AT}", settings=HEARD, survivor_seconds=0.5)
    assert left.statuses == [LEFT_EXIT_STATUS, -9], left.output
    with JournalReader(job.run_dir / "journal.db") as journal:
        events = {event.kind: event for event in journal.events()}
    assert "rank 1 sent no heartbeat for 2 s" in events["left"].message
    assert "all_reduce" in events["left"].message  # where the training thread stood
    assert events["dumped"].iteration == AT

    back = job.launch(settings=HEARD)
    back.require_rest_of(uninterrupted(), back.result()["started"]["iteration"])


def test_a_rank_that_hangs_when_another_is_killed_leaves_its_exact_state(
    job: Job, uninterrupted: Uninterrupted
) -> None:
    """Nothing raises in the training thread, as over NCCL."""
    killed = job.launch(fault=f"alone:1:{AT}", settings={"checkpoint": {"shared_memory": True}})
    assert killed.statuses == [LEFT_EXIT_STATUS, -9], killed.output
    with JournalReader(job.run_dir / "journal.db") as journal:
        noted = {event.kind: event for event in journal.events()}
    assert "the process of rank 1 has ended" in noted["left"].message
    assert "pause" in noted["left"].message or "at_batch" in noted["left"].message
    assert noted["dumped"].iteration == AT

    back = job.launch(settings={"checkpoint": {"shared_memory": True}})
    back.require_rest_of(uninterrupted(), back.result()["started"]["iteration"])
    with JournalReader(job.run_dir / "journal.db") as journal:
        (failed,) = [event for event in journal.events() if event.kind == "failed"]
    assert "rank 1 was killed" in failed.message
