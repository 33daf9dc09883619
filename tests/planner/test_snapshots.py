"""Two tiers: snapshots in host memory between the checkpoints on the disk."""

import math
import random
from dataclasses import dataclass, replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.journal import FailureScope
from cpsr.planner.cost import Costs, per_interval
from cpsr.planner.inputs import FailureClass, Limits, MemoryTier, PlannerInputs
from cpsr.planner.plan import fixed_plan
from cpsr.planner.planning import make_plan, with_memory
from tests.planner.jobs import HOUR, cost_per_second, end_cost, job


def classes(process: float, everything: float) -> dict[FailureScope, FailureClass]:
    shares: dict[FailureScope, float] = {"process": process, "machine": 1 - process - everything}
    shares["everything"] = everything
    return {scope: FailureClass(share, share) for scope, share in shares.items()}


def two_tiers(
    stall_seconds: float = 0.02,
    process: float = 0.5,
    everything: float = 0.2,
    replica_seconds: float | None = None,
    interval_iterations: int | None = None,
    mtbf_hours: float = 12.0,
    disk_stall_seconds: float = 0.9,
    **fields: object,
) -> PlannerInputs:
    memory = MemoryTier(stall_seconds, interval_iterations, replica_seconds)
    fields["stall_seconds"] = disk_stall_seconds
    return job(mtbf_hours, classes=classes(process, everything), memory=memory, **fields)


def memory_interval(inputs: PlannerInputs, interval: int) -> int:
    """Iterations between snapshots beside checkpoints at an interval."""
    snapshots = Costs(inputs).snapshots
    assert snapshots is not None
    return int(snapshots.best(numpy.array([float(interval)]))[0])


def at(inputs: PlannerInputs, every: int, intervals: numpy.ndarray) -> numpy.ndarray:
    """Costs of one interval in memory with several on the disk."""
    assert inputs.memory is not None
    fixed = replace(inputs, memory=replace(inputs.memory, interval_iterations=every))
    return cost_per_second(fixed, intervals, "recompute")


def brute_force(inputs: PlannerInputs, longest: int) -> float:
    """The least cost of all pairs of intervals."""
    chosen = numpy.arange(1, longest + 1, dtype=numpy.float64)
    return min(float(numpy.nanmin(at(inputs, round(every), chosen[place:]))) for place, every in enumerate(chosen))


@st.composite
def jobs(draw: st.DrawFn) -> PlannerInputs:
    stall = draw(st.floats(1e-3, 0.5))
    inputs = two_tiers(
        stall,
        draw(st.floats(0.05, 0.7)),
        draw(st.floats(0.02, 0.3)),
        draw(st.none() | st.floats(0.1, 10.0)),
        mtbf_hours=draw(st.floats(1.0, 100.0)),
        iteration_seconds=draw(st.floats(0.2, 5.0)),
        persist_seconds=draw(st.floats(0.0, 1.0)),
    )
    return replace(inputs, stall_seconds=stall + draw(st.floats(0.0, 5.0)))


@settings(max_examples=30, deadline=None)
@given(jobs())
def test_the_plan_costs_at_most_2_percent_more_than_the_best_pair_of_intervals(inputs: PlannerInputs) -> None:
    longest = 400
    best = brute_force(inputs, longest)
    plan = make_plan(inputs, Limits(1, longest), recovery_mode="exact")
    assert plan.memory_interval_iterations is not None
    assert 1 <= plan.memory_interval_iterations <= plan.interval_iterations
    # 1.3% more has been seen, where a snapshot costs nearly as much as a checkpoint.
    assert plan.explanation["expected"]["cost_per_second"] <= 1.02 * best
    parts = [plan.explanation["expected"][f"{part}_per_second"] for part in ("stall", "recovery")]
    assert sum(parts) == pytest.approx(plan.explanation["expected"]["cost_per_second"], rel=1e-9)


@given(jobs(), st.integers(1, 5000))
def test_snapshots_lie_inside_of_the_interval(inputs: PlannerInputs, interval: int) -> None:
    every = memory_interval(inputs, interval)
    assert 1 <= every <= interval
    between = int(per_interval(numpy.array(float(every)), numpy.array(float(interval))))
    assert between == math.ceil(interval / every) - 1


def test_without_snapshots_every_failure_goes_back_to_the_disk() -> None:
    inputs = job(classes=classes(0.5, 0.2))
    plain, plan = (make_plan(one, Limits(1, 5000)) for one in (job(), inputs))
    assert (plan.interval_iterations, plan.memory_interval_iterations) == (plain.interval_iterations, None)
    assert plan.explanation["expected"] == plain.explanation["expected"]
    assert {one["back_to"] for one in plan.explanation["classes"].values()} == {"disk"}


@pytest.mark.parametrize(("longest", "every"), [(1, 1), (22, 20), (40, 34), (100, 100)])
def test_rare_failures_do_not_stretch_a_planned_interval_over_its_limit(longest: int, every: int) -> None:
    inputs = two_tiers(
        0.002, mtbf_hours=10_000.0, iteration_seconds=0.01, persist_seconds=0.0, disk_stall_seconds=0.002
    )
    assert inputs.memory is not None
    limited = replace(inputs, memory=replace(inputs.memory, longest_iterations=longest))
    plan = with_memory(fixed_plan(100), limited, Limits())
    assert (plan.interval_iterations, plan.memory_interval_iterations) == (100, every)


def test_beside_a_fixed_interval_failures_are_predicted_where_that_is_possible() -> None:
    inputs = two_tiers(recovery=end_cost(0.0, 0.1))
    near, far = (with_memory(fixed_plan(50), inputs, Limits(1, 1000, longest)) for longest in (200, 40))
    near_loss, far_loss = (plan.explanation["classes"]["everything"]["loss_iterations"] for plan in (near, far))
    assert near_loss < 0.5 * far_loss


def test_what_each_class_loses() -> None:
    plan = make_plan(two_tiers(replica_seconds=6.0), Limits(1, 10_000), recovery_mode="exact")
    found = plan.explanation["classes"]
    every = plan.memory_interval_iterations
    assert every is not None
    assert [one["back_to"] for one in found.values()] == ["memory", "replica", "disk"]
    assert found["process"]["loss_iterations"] == pytest.approx(every / 2 + 1, rel=0.02)
    assert found["machine"]["loss_iterations"] == pytest.approx(every / 2 + 6.0 / 0.6, rel=0.02)
    assert found["everything"]["loss_iterations"] == pytest.approx(plan.interval_iterations / 2 + 5.0 / 0.6, rel=0.02)
    total = sum(one["failures_per_second"] * one["loss_iterations"] * 0.6 for one in found.values())
    assert plan.explanation["expected"]["recovery_per_second"] == pytest.approx(total)


@dataclass
class Walk:
    """Every event of a job with two tiers that recomputes, one after the other."""

    inputs: PlannerInputs
    every: int
    interval: int
    random: random.Random

    def lost_per_second(self, failures: int) -> float:
        inputs = self.inputs
        at, disk, wall = 0.0, 0.0, 0.0
        for _ in range(failures):
            life = self.random.expovariate(inputs.failures_per_second)
            wall += life
            reached, memory, disk = self.life(life, at, disk)
            process = self.random.random() < inputs.share("process")
            if not process:
                memory = disk
            at = min(reached, memory)
        return 1 - at * inputs.iteration_seconds / wall

    def life(self, seconds: float, start: float, disk: float) -> tuple[float, float, float]:
        """Where it ends, and its newest whole states, in iterations."""
        inputs = self.inputs
        assert inputs.memory is not None
        iteration, now, done, last = inputs.iteration_seconds, 0.0, 0, 0
        memory, whole = start, list[tuple[float, float, bool]]()
        while True:
            step = min(self.every, self.interval - last % self.interval)
            if now + step * iteration > seconds:
                reached = start + done + (seconds - now) / iteration
                break
            now, done = now + step * iteration, done + step
            last = done
            on_disk = done % self.interval == 0
            now += inputs.stall_seconds if on_disk else inputs.memory.stall_seconds
            whole.append((now + iteration, start + done, False))
            if on_disk:
                whole.append((now + inputs.persist_seconds, start + done, True))
            if now > seconds:
                reached = start + done
                break
        for when, where, on_disk in whole:
            if when <= seconds and on_disk:
                disk = max(disk, where)
            elif when <= seconds:
                memory = max(memory, where)
        return reached, memory, disk


@pytest.mark.parametrize(
    ("mtbf_iterations", "every", "interval", "process"),
    [(500, 10, 100, 0.6), (2000, 25, 100, 0.3), (150, 5, 100, 0.8), (1000, 100, 100, 0.5)],
)
def test_a_walk_through_every_event_agrees(mtbf_iterations: int, every: int, interval: int, process: float) -> None:
    inputs = two_tiers(0.05, process, 1 - process, persist_seconds=5.0, mtbf_hours=mtbf_iterations * 0.6 / HOUR)
    expected = at(inputs, every, numpy.array([float(interval)]))[0]
    walked = Walk(inputs, every, interval, random.Random(0)).lost_per_second(40_000)
    assert expected == pytest.approx(walked, rel=0.03)
