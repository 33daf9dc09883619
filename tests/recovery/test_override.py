"""An override of the interval reaches a running job, holds, and ends by itself."""

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpsr import CPSRRecovery
from cpsr.journal import JournalReader, PlanOverride, PlanRow, override_plan
from tests.recovery.job import INTERVAL, Job
from tests.recovery.test_faults import Loop, config, loader

WAIT_SECONDS = 300.0  # a limit alone: the machine may be busy
EXPIRY_SECONDS = 2.0
PIN = 19  # in so many iterations even a busy disk has written a checkpoint


def pin(run_dir: Path, interval: int, seconds: float) -> None:
    override_plan(
        run_dir,
        PlanOverride(
            interval_iterations=interval,
            reason="repairs",
            expires_unix_seconds=time.time() + seconds,
        ),
    )


def read(run_dir: Path) -> tuple[list[PlanRow], list[int], list[str]]:
    """Plans, checkpoints that were due (steps this short may outrun the disk), and kinds of events."""
    with JournalReader(run_dir / "journal.db") as journal:
        due = sorted(row.iteration for row in journal.checkpoints())
        return journal.plans(), due, [event.kind for event in journal.events()]


def test_a_running_job_takes_an_override_up_and_plans_anew_when_it_ends(tmp_path: Path) -> None:
    """How many steps the machine makes in a second does not matter: it expires once enough checkpoints were due."""
    loop, origins, taken_at = Loop(), list[str](), 0
    planned: dict[str, Any] = {"mtbf_hours": 1e-4, "interval_min_iterations": 3, "interval_max_iterations": 60}
    settings = config(tmp_path, checkpoint={"interval_iterations": None}, planner=planned)
    deadline = time.monotonic() + WAIT_SECONDS
    with CPSRRecovery(loop.adapter, settings) as recovery:
        for x, y in recovery.resume(loader(), repeat=True):
            loop.step(loop.model(x, y))
            time.sleep(0.05)  # so long that no busy disk keeps the planner from the pinned interval
            origins.append(recovery.plan.origin)
            if recovery.iteration == 60:
                pin(tmp_path, PIN, WAIT_SECONDS)
            if not taken_at and origins[-1] == "override":
                taken_at = recovery.iteration
            if taken_at and recovery.iteration == taken_at + 4 * PIN:
                pin(tmp_path, PIN, EXPIRY_SECONDS)
            if time.monotonic() > deadline or (taken_at and origins[-1] != "override"):
                break
    plans, due, kinds = read(tmp_path)
    taken, *later = [plan for plan in plans if plan.origin == "override"]  # it is planned again where a phase ends
    after = plans[plans.index(later[-1] if later else taken) + 1]
    assert (taken.interval_iterations, taken.explanation["override"]["reason"]) == (PIN, "repairs")
    assert taken.explanation["bounds"]["interval_min_iterations"] == 3  # as configured, for a what-if
    assert after.origin == "cpsr"
    assert "override" not in after.explanation
    assert after.explanation["bounds"]["interval_min_iterations"] == 3
    under = [at for at in due if taken.from_iteration + PIN < at < after.from_iteration]
    assert len(under) > 1
    assert {second - first for first, second in pairwise(under)} == {PIN}
    told = [kind for kind in kinds if kind.startswith("override")]
    assert (set(told[:-1]), told[-1]) == ({"override"}, "override ended")
    assert "planning ended" not in kinds


def test_two_ranks_take_it_up_together_also_where_the_interval_is_fixed(job: Job) -> None:
    before = job.launch(iterations=12)
    assert before.statuses == [0, 0], before.output[0][-3000:]
    pin(job.run_dir, PIN, 600.0)
    ended = job.launch(iterations=200)
    assert ended.statuses == [0, 0], ended.output[0][-3000:]
    plans, due, kinds = read(job.run_dir)
    assert [plan.origin for plan in plans] == ["fixed", "fixed", "override"]
    assert (plans[-2].interval_iterations, plans[-1].interval_iterations) == (INTERVAL, PIN)
    under = [at for at in due[:-1] if at > plans[-1].from_iteration + PIN]  # the last is at the end of the run
    assert len(under) > 1
    assert {second - first for first, second in pairwise(under)} == {PIN}
    assert "checkpoint failed" not in kinds
