"""The interval that the planner chooses, or a user pins, is agreed by the ranks and explained in the journal."""

import time
from itertools import pairwise
from typing import Any

from cpsr.journal import FitRow, JournalReader, PlanOverride, override_plan
from tests.recovery.job import INTERVAL, Job

SETTINGS: dict[str, Any] = {
    "checkpoint": {"interval_iterations": None},
    "planner": {"mtbf_hours": 0.01, "interval_min_iterations": 3, "interval_max_iterations": 9},
}


def test_two_ranks_plan_anew_at_the_end_of_each_phase(job: Job) -> None:
    ended = job.launch(settings=SETTINGS, iterations=240, phase_iterations=30)
    assert ended.statuses == [0, 0], ended.output[0][-3000:]
    with JournalReader(job.run_dir / "journal.db") as journal:
        plans, phases, fits = journal.plans(), journal.phases(), journal.newest(FitRow, 99)
        saved = [row.iteration for row in journal.checkpoints() if row.status == "committed"]
        events = [event.kind for event in journal.events()]
    assert "planning ended" not in events
    assert saved[0] == 3, "before anything is measured the minimum holds"
    assert [phase.phase for phase in phases] == list(range(len(phases)))
    assert phases
    assert all(phase.last_iteration - phase.first_iteration >= 30 for phase in phases)
    assert {fit.kind for fit in fits} >= {"loss", "failure_rate"}
    first, *_, last = plans
    assert first.from_iteration == 0
    assert last.origin == "cpsr"
    assert last.mode in ("predict", "recompute")
    assert last.from_iteration > phases[0].last_iteration
    inputs = last.explanation["inputs"]
    assert inputs["stall_seconds"] > 0
    assert inputs["iteration_seconds"] > 0
    assert {"theorem1", "young", "daly"} <= set(last.explanation["rivals"])


def test_a_life_goes_on_with_the_interval_and_the_phases_of_the_one_before(job: Job) -> None:
    # A maximum that no slow disk reaches: what a disk needs goes before it, and a restart keeps to it.
    bounds = {"interval_min_iterations": 2, "interval_max_iterations": 10_000}
    settings = {**SETTINGS, "planner": {**SETTINGS["planner"], **bounds, "policy": "daly"}}
    first = job.launch(settings=settings, iterations=120, phase_iterations=30)
    assert first.statuses == [0, 0], first.output[0][-3000:]
    second = job.launch(
        settings=settings, iterations=600, phase_iterations=30
    )  # phases are seen to end at checkpoints, far apart or not
    assert second.statuses == [0, 0], second.output[0][-3000:]
    with JournalReader(job.run_dir / "journal.db") as journal:
        plans, phases = journal.plans(), journal.phases()
    before = [plan for plan in plans if plan.life == 0][-1]
    after = next(plan for plan in plans if plan.life == 1)
    assert after.interval_iterations == before.interval_iterations
    assert "before the restart" in after.explanation["rule"]
    assert [phase.phase for phase in phases] == list(range(len(phases)))
    assert all(old.last_iteration == new.first_iteration for old, new in pairwise(phases))
    assert any(phase.life == 1 for phase in phases)


def test_two_ranks_take_an_override_up_together_also_where_the_interval_is_fixed(job: Job) -> None:
    before = job.launch(iterations=12)
    assert before.statuses == [0, 0], before.output[0][-3000:]
    pinned = 45  # one that the disk cannot follow is raised: 30 were, while it wrote for four tests
    expires = time.time() + 600.0
    override_plan(job.run_dir, PlanOverride(interval_iterations=pinned, reason="repairs", expires_unix_seconds=expires))
    ended = job.launch(iterations=200)
    assert ended.statuses == [0, 0], ended.output[0][-3000:]
    with JournalReader(job.run_dir / "journal.db") as journal:
        plans, due = journal.plans(), sorted(row.iteration for row in journal.checkpoints())
        assert "checkpoint failed" not in [event.kind for event in journal.events()]
    assert [plan.origin for plan in plans] == ["fixed", "fixed", "override"]
    assert (plans[-2].interval_iterations, plans[-1].interval_iterations) == (INTERVAL, pinned)
    under = [at for at in due[:-1] if at > plans[-1].from_iteration + pinned]  # the last is at the end of the run
    assert len(under) > 1
    assert {second - first for first, second in pairwise(under)} == {pinned}
