"""The interval that the planner chooses is agreed by the ranks and explained in the journal."""

from cpsr.journal import JournalReader
from tests.recovery.job import Job


def test_young_on_two_ranks(job: Job) -> None:
    ended = job.launch(
        settings={
            "checkpoint": {"interval_iterations": None},
            "planner": {"mtbf_hours": 0.01, "interval_min_iterations": 3, "interval_max_iterations": 9},
        }
    )
    assert ended.statuses == [0, 0], ended.output[0][-3000:]
    with JournalReader(job.run_dir / "journal.db") as journal:
        plan = journal.latest_plan()
        saved = [row.iteration for row in journal.checkpoints() if row.status == "committed"]
    assert plan is not None
    assert plan.origin == "young"
    assert plan.from_iteration > 0, "it was planned anew from what was measured"
    assert plan.explanation["inputs"]["stall_seconds"] > 0
    assert plan.explanation["inputs"]["iteration_seconds"] > 0
    assert saved[0] == 3, "before anything is measured the minimum holds"
