import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.checkpoint.writer import SaveOutcome
from cpsr.config import CPSRConfig
from cpsr.fitter.phases import PhaseDetector
from cpsr.journal import (
    FitRow,
    JournalReader,
    PlanOverride,
    RankJournal,
    StepRow,
    open_journal,
    override_plan,
)
from cpsr.planner.live import job_planner
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.planner.live.measurements import RankCosts
from cpsr.planner.plan import Plan, Situation
from cpsr.ranks.group import Group
from cpsr.state.shard import Shard
from tests.planner.live.test_expectations import ACCURACY

PARAMETERS = 1000
WAIT_SECONDS = 20.0


def configured(run_dir: Path, **sections: Any) -> CPSRConfig:
    return CPSRConfig.load({"run_dir": str(run_dir), **sections})


@pytest.fixture(autouse=True)
def short_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = partial(PhaseDetector, min_iterations=50, max_iterations=200)
    monkeypatch.setattr(job_planner, "PhaseDetector", detector)


def planner_of(
    config: CPSRConfig,
    rank: int = 0,
    accuracy: Callable[[], Sequence[Any]] = list,
    ranks: int = 1,
) -> JobPlanner:
    return JobPlanner(config, rank, ranks, PARAMETERS, 0.0, accuracy)


def saved(iteration: int, moment: float | None = 1.0, stall_seconds: float = 0.02) -> SaveOutcome:
    return SaveOutcome(iteration, "committed", "", 100, 0.1, 0.1, stall_seconds, moment)


def situation(iteration: int, plan: Plan) -> Situation:
    return Situation(iteration, 1e-3, 1e-3, 0.1, plan)


def step(iteration: int) -> StepRow:
    return StepRow(life=0, iteration=iteration, loss=3.0 - 1e-3 * iteration, learning_rate=1e-3, seconds=0.1)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[RankJournal]:
    journal = open_journal(tmp_path, Group(), "auto")
    journal.record(*map(step, range(1, 401)))
    yield journal
    journal.close("clean")


def written(journal: RankJournal) -> None:
    journal.flush(WAIT_SECONDS)


def proposed(planner: JobPlanner) -> Plan | None:
    """What the thread proposes."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        found = planner.proposal()
        if found is not None:
            return found
        time.sleep(0.01)
    return None


def test_it_plans_from_what_was_measured_and_at_the_end_of_each_phase(tmp_path: Path, journal: RankJournal) -> None:
    planner = planner_of(configured(tmp_path))
    first = planner.first_plan({})
    assert (first.interval_iterations, first.explanation["bound"]) == (10, "minimum")
    planner.start(tmp_path, journal)
    planner.note(saved(100))
    planner.consider(situation(110, first))
    plan = proposed(planner)
    assert plan is not None
    assert plan.interval_iterations > 10, "0.02 s of stall at 12 h between failures"
    assert plan.explanation["inputs"]["stall_seconds"] == 0.02
    assert plan.explanation["inputs"]["recovery"]["source"].startswith("the offline prior")
    planner.note(saved(200, moment=1.2))
    planner.consider(situation(210, plan))
    again = proposed(planner)
    assert again is not None, "a phase has ended: the plan is proposed anew although its interval is the same"
    planner.close()
    written(journal)
    with JournalReader(tmp_path / "journal.db") as reader:
        (phase,) = reader.phases()
        kinds = [fit.kind for fit in reader.newest(FitRow, 99)]
    assert (phase.first_iteration, phase.last_iteration, phase.xi, phase.last_xi) == (100, 200, 1.0, 1.2)
    assert kinds.count("loss") == 2
    assert kinds.count("failure_rate") == 2


def test_a_plan_that_is_as_good_is_not_proposed(tmp_path: Path, journal: RankJournal) -> None:
    planner = planner_of(configured(tmp_path))
    planner.start(tmp_path, journal)
    planner.note(saved(100))
    planner.consider(situation(110, planner.first_plan({})))
    plan = proposed(planner)
    assert plan is not None
    planner.note(saved(120, stall_seconds=0.0201))
    planner.consider(situation(130, plan))
    time.sleep(0.5)
    assert planner.proposal() is None
    planner.note(saved(140, stall_seconds=2.0))
    planner.note(saved(160, stall_seconds=2.0))
    planner.note(saved(180, stall_seconds=2.0))
    planner.consider(situation(190, plan))
    dearer = proposed(planner)
    assert dearer is not None
    assert dearer.interval_iterations > plan.interval_iterations
    planner.close()


def test_what_fails_ends_planning_and_is_reported_once(tmp_path: Path, journal: RankJournal) -> None:
    def broken() -> list[Any]:
        raise ValueError("no accuracy today")

    planner = planner_of(configured(tmp_path), accuracy=broken)
    planner.start(tmp_path, journal)
    planner.note(saved(100))
    planner.consider(situation(110, planner.first_plan({})))
    failure, until = None, time.monotonic() + WAIT_SECONDS
    while failure is None and time.monotonic() < until:
        time.sleep(0.01)
        failure = planner.failure()
    assert failure is not None
    assert "no accuracy today" in failure
    assert "keeps the current interval" in failure
    assert planner.failure() is None
    planner.close()


def test_other_ranks_only_record_their_costs(tmp_path: Path, journal: RankJournal) -> None:
    planner, threads = planner_of(configured(tmp_path), rank=1), threading.enumerate()
    planner.start(tmp_path, journal)
    planner.note(saved(100))
    planner.consider(situation(110, planner.first_plan({})))
    assert threading.enumerate() == threads
    state = planner.state_dict(planner.first_plan({}))
    assert state["costs"] == {
        "stall_seconds": 0.02,
        "persist_seconds": 0.2,
        "parameters": PARAMETERS,
        "mean_second_moment": 1.0,
        "memory": {"copy_seconds": 0.02},
    }


def test_a_new_life_goes_on_with_phases_costs_and_interval(tmp_path: Path, journal: RankJournal) -> None:
    before = planner_of(configured(tmp_path))
    before.note(saved(200, stall_seconds=0.5))
    phases = PhaseDetector(0.05, 50, 200, 0.0)
    assert phases.observe(100, 1.0) is None
    assert phases.observe(200, 1.2) is not None
    state = before.state_dict(Plan(70, "cpsr", {}, "recompute")) | {"phases": phases.state_dict()}
    after = planner_of(configured(tmp_path))
    after.load_state_dict(state, replicates=True)
    assert phases_of(after)["ended"] == 1
    plan = after.first_plan(state)
    assert (plan.interval_iterations, plan.origin, plan.mode) == (70, "cpsr", "recompute")
    assert "before the restart" in plan.explanation["rule"]
    # It plans before its own first checkpoint: a job that fails before each would never plan otherwise.
    after.start(tmp_path, journal)
    after.consider(situation(210, plan))
    again = proposed(after)
    assert again is not None
    assert again.explanation["inputs"]["stall_seconds"] == 0.5
    after.close()
    after.load_state_dict({}, replicates=True)  # a checkpoint from before there were phases
    assert phases_of(after)["ended"] == 1


def test_a_journal_that_cannot_be_read_now_is_read_later(tmp_path: Path, journal: RankJournal) -> None:
    (tmp_path / "commands.db").write_bytes(b"x" * 4096)
    planner = planner_of(configured(tmp_path))
    planner.start(tmp_path, journal)
    planner.note(saved(100))
    planner.consider(situation(110, planner.first_plan({})))
    plan = proposed(planner)
    assert plan is not None, "planned with what was expected beforehand"
    assert planner.failure() is None
    (tmp_path / "commands.db").unlink()
    planner.note(saved(120, stall_seconds=5.0))
    planner.note(saved(140, stall_seconds=5.0))
    planner.consider(situation(150, plan))
    later = proposed(planner)
    assert later is not None
    rates = [one.explanation["inputs"]["failures_per_second"] for one in (plan, later)]
    assert rates[1] < rates[0], "read now: it has trained for a while, and has not failed yet"
    planner.close()


def fitted(journal: RankJournal, run_dir: Path) -> set[str]:
    written(journal)
    with JournalReader(run_dir / "journal.db") as reader:
        return {fit.kind for fit in reader.newest(FitRow, 99)}


def test_the_users_interval_is_never_changed(tmp_path: Path, journal: RankJournal) -> None:
    planner = planner_of(configured(tmp_path, checkpoint={"interval_iterations": 33}))
    plan = planner.first_plan({"interval_iterations": 70})
    assert (plan.interval_iterations, plan.origin) == (33, "fixed")
    assert plan.memory_interval_iterations == 10, "until it is planned, as short as the shortest interval of the disk"
    planner.start(tmp_path, journal)
    planner.note(saved(100))
    planner.consider(situation(110, plan))
    until = time.monotonic() + WAIT_SECONDS
    while not fitted(journal, tmp_path) and time.monotonic() < until:
        time.sleep(0.01)
    found = proposed(planner)
    assert found is not None
    assert (found.interval_iterations, found.origin, found.mode) == (33, "fixed", None)
    assert found.memory_interval_iterations in range(1, 34)
    assert found.explanation["classes"]["process"]["back_to"] == "memory"
    planner.close()
    assert fitted(journal, tmp_path) == {"loss", "failure_rate"}


def test_snapshots_in_memory_are_planned_by_what_they_cost(tmp_path: Path, journal: RankJournal) -> None:
    planner = planner_of(configured(tmp_path, planner={"interval_max_iterations": 5000}))
    planner.start(tmp_path, journal)
    planner.note(saved(100, stall_seconds=2.0))
    planner.consider(situation(110, planner.first_plan({})))
    before = proposed(planner)
    assert before is not None
    assert before.explanation["inputs"]["memory"]["stall_seconds"] == 2.0, "as long as a checkpoint's, until measured"
    for stall in (0.002, 0.002, 9.0):
        planner.note_memory(stall, 0.0)
    planner.times.replica(1.5)
    planner.consider(situation(130, before))
    after = proposed(planner)
    assert after is not None
    assert after.memory_interval_iterations is not None
    assert before.memory_interval_iterations is not None
    assert after.memory_interval_iterations < before.memory_interval_iterations
    assert after.memory_interval_iterations < after.interval_iterations
    assert [one["back_to"] for one in after.explanation["classes"].values()] == ["memory", "replica", "disk"]
    state = planner.state_dict(after)
    planner.close()
    again = planner_of(configured(tmp_path))
    again.load_state_dict(state, replicates=True)
    assert again.first_plan(state).memory_interval_iterations == after.memory_interval_iterations
    assert again.state_dict(after)["costs"]["memory"] == {
        "stall_seconds": 0.002,
        "copy_seconds": 2.0,
        "replica_seconds": 1.5,
    }


def test_windows_take_the_place_of_snapshots(tmp_path: Path, journal: RankJournal) -> None:
    planner = planner_of(configured(tmp_path, replay={"enabled": True}))
    assert planner.first_plan({}).memory_interval_iterations == 1
    planner.start(tmp_path, journal)
    planner.note(saved(100))
    planner.note_window(6)
    planner.consider(situation(110, planner.first_plan({})))
    plan = proposed(planner)
    assert plan is not None
    process = plan.explanation["classes"]["process"]
    assert (plan.memory_interval_iterations, process["back_to"]) == (6, "window")
    assert process["loss_iterations"] == pytest.approx(9.0, rel=0.01)
    planner.note_window(None)
    planner.consider(situation(130, plan))
    without = proposed(planner)
    planner.close()
    assert without is not None
    assert without.explanation["classes"]["process"]["back_to"] in ("disk", "predicted")


@pytest.mark.parametrize(("stall_seconds", "every"), [(0.0001, 10), (0.0025, 10), (0.005, 20), (0.0105, 42)])
def test_a_kill_loses_no_more_than_the_budget_has_to_allow(
    tmp_path: Path, journal: RankJournal, stall_seconds: float, every: int
) -> None:
    """An iteration takes 0.1 s: the budget is 0.25 ms for each."""
    limits = {"mtbf_hours": 1e6}
    config = configured(tmp_path, checkpoint={"interval_iterations": 840}, planner=limits)
    planner = planner_of(config)
    planner.start(tmp_path, journal)
    planner.note_memory(stall_seconds, 0.0)
    planner.note(saved(10))
    planner.consider(situation(11, planner.first_plan({"memory_interval_iterations": 300})))
    found = proposed(planner)
    planner.close()
    assert found is not None
    assert found.memory_interval_iterations == every


def test_snapshots_beside_a_fixed_interval_wait_for_no_checkpoint(tmp_path: Path, journal: RankJournal) -> None:
    planner = planner_of(configured(tmp_path, checkpoint={"interval_iterations": 5000}))
    planner.start(tmp_path, journal)
    planner.consider(situation(10, planner.first_plan({})))
    for _ in range(7):
        planner.note_memory(0.05, 0.0)
    time.sleep(0.5)
    assert planner.proposal() is None, "too few are measured"
    planner.note_memory(0.05, 0.0)
    found = proposed(planner)
    planner.close()
    assert found is not None
    assert (found.interval_iterations, found.memory_interval_iterations) == (5000, 200), "the budget is 0.25 ms a step"
    assert planner.state_dict(found)["costs"] is None, "other ranks' checkpoints are measured, or not reported"


def test_planning_draws_no_random_numbers_and_imports_nothing_slow(tmp_path: Path) -> None:
    """It would draw them between those of the training thread, at another place in every life."""
    # In a process of its own: here everything is imported already.
    script = f"""
import random, sys, time
from pathlib import Path
import numpy, torch
from cpsr.config import CPSRConfig
from cpsr.ranks.group import Group
from cpsr.planner.live.job_planner import JobPlanner
from cpsr.planner.plan import Situation
from cpsr.checkpoint.writer import SaveOutcome
from cpsr.journal import StepRow, open_journal
run_dir = Path({str(tmp_path)!r})
noise = numpy.random.default_rng(0)
journal = open_journal(run_dir, Group(), "auto")
for at in range(1, 401):
    journal.record(StepRow(life=0, iteration=at, loss=3 - at / 1000 + noise.normal() / 20, learning_rate=1, seconds=1))
before = random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()
planner = JobPlanner(CPSRConfig.load({{"run_dir": run_dir}}), 0, 1, 1, 0.0, list)
planner.start(run_dir, journal)
planner.note(SaveOutcome(100, "committed", "", 100, 0.1, 0.1, 0.02, 1.0))
planner.consider(Situation(400, 1e-3, 1e-3, 0.1, planner.first_plan({{}})))
until = time.monotonic() + {WAIT_SECONDS}
while planner.proposal() is None and time.monotonic() < until:
    time.sleep(0.01)
planner.close()
journal.close("clean")
assert not {{"scipy.optimize", "sklearn", "rich"}} & set(sys.modules)  # training steps would wait for it
assert before == (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def commit_costs(run_dir: Path, iteration: int, costs: Sequence[RankCosts]) -> None:
    """Commit a checkpoint in which every rank records what its own cost."""
    stores = [CheckpointStore(run_dir, rank, len(costs), "run", 0) for rank in range(len(costs))]
    stores[0].prepare()
    for store, own in reversed(list(zip(stores, costs, strict=True))):
        store.write(Snapshot(iteration, Shard({}), {"planning": {"costs": vars(own)}}))
    assert stores[0].commit(iteration, WAIT_SECONDS, threading.Event()).committed


def test_the_slowest_rank_decides_what_snapshots_in_memory_cost(tmp_path: Path, journal: RankJournal) -> None:
    times = [{"stall_seconds": 0.9, "replica_seconds": 9.0}, {"stall_seconds": 0.3, "replica_seconds": 0.5}]
    commit_costs(tmp_path, 2000, [RankCosts(0.02, 0.2, PARAMETERS, 1.0, memory) for memory in times])
    planner = planner_of(configured(tmp_path), ranks=2)
    planner.start(tmp_path, journal)
    planner.note_memory(0.1, 0.0)
    planner.times.replica(2.0)
    planner.note(saved(2000))
    planner.consider(situation(2010, planner.first_plan({})))
    plan = proposed(planner)
    planner.close()
    assert plan is not None
    shown = plan.explanation["inputs"]["memory"]
    assert (shown["stall_seconds"], shown["replica_seconds"]) == (0.3, 2.0), "rank 0 knows its own better"


@pytest.mark.parametrize("others", [[], [3.0, 5.0]])
def test_the_theorem_takes_the_moments_of_all_weights_without_their_bias(
    tmp_path: Path, journal: RankJournal, others: list[float]
) -> None:
    """Adam's moments began as zeros: those of iteration 19 are smaller than those of 220."""
    moments = [1.0, *others]
    ranks, biased = len(moments), [moment * (1.0 - 0.999**19) for moment in moments]
    commit_costs(tmp_path, 20, [RankCosts(0.02, 0.2, PARAMETERS, moment) for moment in biased])
    planner = JobPlanner(configured(tmp_path), 0, ranks, PARAMETERS, 0.999, lambda: ACCURACY)
    planner.start(tmp_path, journal)
    written(journal)
    # The longest phase of these tests ends.
    for iteration in (20, 220):
        planner.note(saved(iteration, moment=1.0 - 0.999**iteration))
    planner.consider(situation(230, planner.first_plan({})))
    plan = proposed(planner)
    planner.close()
    assert plan is not None
    phase = plan.explanation["inputs"]["phase"]
    assert (phase["xi"], phase["parameters"]) == (pytest.approx(sum(moments) / ranks), ranks * PARAMETERS)


def phases_of(planner: JobPlanner) -> dict[str, Any]:
    found: dict[str, Any] = planner.state_dict(Plan(50, "cpsr", {}))["phases"]
    return found


def pin(run_dir: Path, interval: int | None) -> None:
    """Override the interval for longer than any test; None withdraws that."""
    override_plan(
        run_dir,
        PlanOverride(
            interval_iterations=interval or 1, reason="x", expires_unix_seconds=time.time() + 600.0 if interval else 0.0
        ),
    )


def test_an_override_is_proposed_once_something_is_measured_and_taken_back(
    tmp_path: Path, journal: RankJournal
) -> None:
    pin(tmp_path, 33)
    planner = planner_of(configured(tmp_path))
    first = planner.first_plan({})
    planner.start(tmp_path, journal)
    time.sleep(1.5)  # longer than it takes to hear of it
    assert planner.proposal() is None, "nothing is measured yet"
    planner.note(saved(100))
    planner.consider(situation(110, first))
    pinned = proposed(planner)
    assert pinned is not None
    assert (pinned.interval_iterations, pinned.origin) == (33, "override")
    assert pinned.explanation["inputs"]["stall_seconds"] == 0.02
    later = planner_of(configured(tmp_path))
    later.load_state_dict(planner.state_dict(pinned), replicates=False)
    chosen = pinned.explanation["rivals"]["theorem1"]["interval_iterations"]
    assert chosen != 33
    assert later.state_dict(Plan(33, "cpsr", {}))["theorem1_interval_iterations"] == chosen, "not the override's"
    pin(tmp_path, None)
    after = proposed(planner)
    assert after is not None
    assert (after.origin, "override" in after.explanation) == ("cpsr", False)
    planner.close()
    written(journal)
    with JournalReader(tmp_path / "journal.db") as reader:
        assert [event.kind for event in reader.events() if "override" in event.kind] == ["override", "override ended"]


def test_a_fixed_interval_is_overridden_as_well(tmp_path: Path, journal: RankJournal) -> None:
    planner = planner_of(configured(tmp_path, checkpoint={"interval_iterations": 50, "shared_memory": False}))
    planner.start(tmp_path, journal)
    planner.note(saved(100))
    planner.consider(situation(110, planner.first_plan({})))
    pin(tmp_path, 20)
    pinned = proposed(planner)
    assert pinned is not None
    assert (pinned.interval_iterations, pinned.origin) == (20, "override")
    pin(tmp_path, None)
    after = proposed(planner)
    assert after is not None
    assert (after.interval_iterations, after.origin) == (50, "fixed")
    planner.close()
