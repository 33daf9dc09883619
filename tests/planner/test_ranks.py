from dataclasses import replace

import numpy
import pytest

from cpsr.planner.bounds import Limits
from cpsr.planner.inputs import MemoryTier, Origin
from cpsr.planner.plan import make_plan
from cpsr.planner.ranks import job_of
from tests.planner.jobs import PHASE, end_cost, job

WIDE = Limits(1, 3000)


def test_a_job_waits_for_its_slowest_rank() -> None:
    ranks = [job(stall_seconds=2.0), job(persist_seconds=9.0), job(iteration_seconds=0.7)]
    together = job_of(ranks)
    assert (together.stall_seconds, together.persist_seconds, together.iteration_seconds) == (2.0, 9.0, 0.7)


def test_what_is_not_known_of_one_rank_is_not_known_of_the_job() -> None:
    assert numpy.isnan(job_of([job(), job(stall_seconds=numpy.nan), job()]).stall_seconds)


def test_the_origin_of_a_figure_is_that_of_the_rank_it_is_of() -> None:
    old, new = Origin("measured", 3, 500), Origin("measured", 9, 20)
    first = job(stall_seconds=1.0, persist_seconds=9.0, origins={"stall_seconds": old, "persist_seconds": old})
    second = job(stall_seconds=2.0, persist_seconds=8.0, origins={"stall_seconds": new, "persist_seconds": new})
    assert job_of([first, second]).origins == {"stall_seconds": new, "persist_seconds": old}
    unknown = replace(second, persist_seconds=numpy.nan)
    assert job_of([first, unknown]).origins["persist_seconds"] == new


def test_the_slowest_rank_decides_what_a_snapshot_costs() -> None:
    old, new = Origin("measured", 3, 500), Origin("measured", 9, 20)
    names = ("memory_stall_seconds", "replica_seconds")
    first = job(memory=MemoryTier(0.1, 7, 5.0), origins=dict.fromkeys(names, old))
    second = job(memory=MemoryTier(0.4, 7, 2.0), origins=dict.fromkeys(names, new))
    together = job_of([first, second])
    assert together.memory == MemoryTier(0.4, 7, 5.0)
    assert together.origins == {"memory_stall_seconds": new, "replica_seconds": old}
    assert job_of([first, job(memory=MemoryTier(0.05, 7))]).memory == MemoryTier(0.1, 7)
    assert job_of([first, job()]).memory is None


def test_a_predicted_restart_predicts_all_ranks() -> None:
    ranks = [job(phase=replace(PHASE, parameters=parameters)) for parameters in (5, 7, 11)]
    assert job_of(ranks).phase == replace(PHASE, parameters=23)
    assert job_of([*ranks, job(phase=None)]).phase is None


def test_a_failure_may_hit_any_rank() -> None:
    cheap, dear = end_cost(0.0, 0.4), end_cost(10.0, 1.0)
    together = job_of([job(recovery=cheap), job(recovery=cheap), job(recovery=dear)])
    assert together.recovery is not None
    assert together.recovery.end_cost_iterations(numpy.array([30.0]), 50.0)[0] == pytest.approx(
        (12.0 + 12.0 + 40.0) / 3
    )
    assert "3 ranks" in together.recovery.source
    assert job_of([job(recovery=cheap), job()]).recovery is None


def test_the_interval_is_inside_everyones_bounds() -> None:
    ranks = [job(stall_seconds=0.5), job(stall_seconds=2.0, persist_seconds=60.0)]
    assert make_plan(ranks, WIDE).interval_iterations >= 100


def test_a_job_with_a_rank_that_cannot_be_predicted_recomputes() -> None:
    ranks = [job(recovery=end_cost(0.0, 0.3)), job()]
    plan = make_plan(ranks, WIDE)
    assert plan.mode == "recompute"
    assert plan.explanation["modes"]["predict"] == "not possible"
