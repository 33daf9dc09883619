import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.baselines import CheckFreq, Daly, Fixed, Gemini, PCcheck, Young, baselines
from cpsr.planner.choice import LONGEST, SHORTEST
from cpsr.planner.inputs import PlannerInputs
from cpsr.planner.objective import cost_per_second
from tests.planner.jobs import HOUR, USUAL, any_job, job


def chosen(rule: Young | Daly | CheckFreq | PCcheck | Gemini | Fixed, **fields: float) -> int:
    return rule.choose(job(**fields)).interval_iterations


def test_young_by_hand() -> None:
    # sqrt(2 * 0.5 s * 43,200 s) = 207.846 s, at 1.5 s an iteration: 138.56
    assert chosen(Young(), stall_seconds=0.5, iteration_seconds=1.5) == 139


@pytest.mark.parametrize(
    ("stall", "iteration", "interval"),
    [
        (0.0, 1.0, SHORTEST),
        (math.inf, 1.0, LONGEST),
        (math.nan, 1.0, SHORTEST),
        (-1.0, 1.0, SHORTEST),
        (1.0, 0.0, LONGEST),
        (1.0, math.inf, SHORTEST),
        (1.0, math.nan, SHORTEST),
        (0.0, 0.0, SHORTEST),
    ],
)
def test_young_at_the_limits_says_what_is_unusual(stall: float, iteration: float, interval: int) -> None:
    choice = Young().choose(job(stall_seconds=stall, iteration_seconds=iteration))
    assert choice.interval_iterations == interval
    assert choice.note


def test_no_failures_expected_is_no_checkpoint() -> None:
    inputs = PlannerInputs(1.0, 0.5, 1.0, 0.0)
    for rule in (Young(), Daly(), Gemini()):
        assert rule.choose(inputs).interval_iterations == LONGEST


@given(st.floats(0.1, 1000.0), st.floats(0.05, 100.0))
def test_daly_is_the_minimum_of_his_wall_time(stall: float, mtbf_hours: float) -> None:
    """`M exp(R / M) (exp((T_c + T_s) / M) - 1) / T_c` per second of work; the restart R moves nothing."""
    mtbf, seconds = mtbf_hours * HOUR, 0.01
    if stall > mtbf / 2:
        return  # his expansion is for T_s < M / 2

    def wall_time(interval: float) -> float:
        return mtbf * math.expm1((interval + stall) / mtbf) / interval

    daly = chosen(Daly(), mtbf_hours=mtbf_hours, stall_seconds=stall, iteration_seconds=seconds) * seconds
    every = numpy.geomspace(stall / 100, 10 * mtbf, 20_000)
    with numpy.errstate(over="ignore"):
        least = float(numpy.min(mtbf * numpy.expm1((every + stall) / mtbf) / every))
    assert wall_time(daly) <= least * 1.001
    young = chosen(Young(), mtbf_hours=mtbf_hours, stall_seconds=stall, iteration_seconds=seconds) * seconds
    assert wall_time(daly) <= wall_time(young) * (1 + 1e-6)


def test_daly_beyond_his_range_takes_the_mean_time_between_failures() -> None:
    assert chosen(Daly(), mtbf_hours=1.0, stall_seconds=3 * HOUR, iteration_seconds=1.0) == 3600


def test_checkfreq_by_hand() -> None:
    # 45 s to the disk are 30 iterations of 1.5 s; a stall of 1.2 s in 45 s is 2.67%, in 61.5 s (41) it is 1.95%.
    job_seconds = {"stall_seconds": 1.2, "iteration_seconds": 1.5, "persist_seconds": 45.0}
    assert chosen(CheckFreq(0.02), **job_seconds) == 40
    assert chosen(CheckFreq(0.035), **job_seconds) == 30
    assert chosen(CheckFreq(0.0), **job_seconds) == LONGEST


@given(USUAL, USUAL, USUAL, st.floats(1e-3, 0.5))
def test_checkfreq_is_the_first_step_within_its_limit(
    stall: float, iteration: float, persist: float, limit: float
) -> None:
    interval = chosen(CheckFreq(limit), stall_seconds=stall, iteration_seconds=iteration, persist_seconds=persist)
    if interval == LONGEST:
        assert max(persist, stall / limit) / iteration >= LONGEST * (1 - 1e-9)
        return
    assert interval * iteration >= persist * (1 - 1e-9)
    assert stall <= limit * interval * iteration * (1 + 1e-9)
    first = max(math.ceil(persist / iteration), 1)
    assert interval == first or stall > limit * (interval - 2) * iteration * (1 - 1e-9)


def test_pcchecks_tolerance_is_a_factor() -> None:
    # 45 s to the disk, two at a time, between iterations of 1.02 * 1.5 s: 14.7.
    assert chosen(PCcheck(1.02, 2), persist_seconds=45.0, iteration_seconds=1.5) == 15
    # Twice as slow is twice as often; a fraction of 0.02 would make it 50 times as rare.
    assert chosen(PCcheck(2.04, 2), persist_seconds=45.0, iteration_seconds=1.5) == 8


def test_pcchecks_cost_by_hand() -> None:
    # Per failure half of 15 * 1.5 s, and half of what two checkpoints of 22.5 s keep under way: 45 s at most.
    inputs = job(stall_seconds=1.2, persist_seconds=60.0, iteration_seconds=1.5)
    assert PCcheck().cost(inputs, 15) == pytest.approx(1.2 / 23.7 + (22.5 / 2 + 45.0 / 2) / 43200)


@given(st.floats(0.01, 100.0), st.floats(0.1, 100.0), st.floats(0.05, 100.0))
def test_no_interval_is_cheaper_than_the_oracles(stall: float, iteration: float, mtbf_hours: float) -> None:
    inputs = job(mtbf_hours, stall_seconds=stall, iteration_seconds=iteration)
    interval = Gemini().choose(inputs).interval_iterations
    every = numpy.unique(numpy.rint(numpy.geomspace(1, 1e6, 2000)))
    assert Gemini().cost(inputs, interval) <= cost_per_second(inputs, every, "recompute").min() * (1 + 1e-12)


def test_a_copy_in_memory_is_younger_than_one_on_a_disk() -> None:
    # Of failures so rare that none meets another; one in a stall of 0.9 s loses no more for an older copy.
    inputs = job(1e5, persist_seconds=60.0)
    saved = Gemini().cost(inputs, 100) - Gemini(replicate_seconds=10.0).cost(inputs, 100)
    assert saved == pytest.approx(50.0 * 60 / 60.9 / 3.6e8, rel=1e-5)


def test_fixed_is_what_it_is() -> None:
    assert chosen(Fixed(50)) == 50
    assert baselines(50)["fixed"].choose(job()).interval_iterations == 50
    assert "fixed" not in baselines()


@given(any_job())
def test_any_input_gives_an_interval(inputs: PlannerInputs) -> None:
    for rule in baselines(50).values():
        interval = rule.choose(inputs).interval_iterations
        assert isinstance(interval, int)
        assert SHORTEST <= interval <= LONGEST


@given(USUAL, USUAL, st.floats(0.01, 1000.0))
def test_a_longer_stall_or_fewer_failures_never_shorten_youngs_interval(
    stall: float, iteration: float, mtbf_hours: float
) -> None:
    usual = chosen(Young(), mtbf_hours=mtbf_hours, stall_seconds=stall, iteration_seconds=iteration)
    assert chosen(Young(), mtbf_hours=mtbf_hours, stall_seconds=2 * stall, iteration_seconds=iteration) >= usual
    assert chosen(Young(), mtbf_hours=2 * mtbf_hours, stall_seconds=stall, iteration_seconds=iteration) >= usual
