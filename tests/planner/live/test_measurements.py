from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.checkpoint.writer import SaveOutcome
from cpsr.planner.live.measurements import RankCosts, RankTimes, second_moment_share

COSTS = RankCosts(100, 3, 0.02, 0.2, 1000, 1e-6)


@pytest.mark.parametrize("own", [None, 0.0, float("nan"), float("inf")])
def test_there_is_no_share_of_what_the_first_rank_does_not_have(own: float | None) -> None:
    assert second_moment_share([replace(COSTS, mean_second_moment=own), COSTS]) is None


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-20, 1e20)), min_size=1, max_size=8))
def test_the_first_ranks_own_times_the_share_is_the_mean_of_all(ranks: list[tuple[int, float]]) -> None:
    costs = [replace(COSTS, parameters=parameters, mean_second_moment=moment) for parameters, moment in ranks]
    share = second_moment_share(costs)
    assert share is not None
    moments = [moment for _, moment in ranks]
    assert min(moments) * (1 - 1e-9) <= share * moments[0] <= max(moments) * (1 + 1e-9)


def stall(meter: RankTimes, blocked_seconds: float) -> float:
    """The cost of checkpoints that all stall alike."""
    meter.durable(SaveOutcome(100, "committed", "", 100, 0.1, 0.1, blocked_seconds, None))
    costs = meter.costs()
    assert costs is not None
    return costs.stall_seconds


def metered(calm: int, under_way: list[float], blocked_seconds: float = 0.01) -> float:
    meter = RankTimes(1)
    for _ in range(calm):
        meter.step(0.1)
    meter.begun()
    for seconds in under_way:
        meter.step(seconds)
    return stall(meter, blocked_seconds)


def test_slower_steps_while_it_is_written_are_its_cost() -> None:
    assert metered(20, [0.15, 0.13, 0.1]) == pytest.approx(0.08)


def test_snapshots_to_memory_meanwhile_are_not_its_cost() -> None:
    meter = RankTimes(1)
    for _ in range(20):
        meter.snapshot(0.02)
        meter.step(0.12)
    meter.begun()
    for _ in range(5):
        meter.snapshot(0.02)
        meter.step(0.13)
    assert stall(meter, 0.0) == pytest.approx(0.05)


@pytest.mark.parametrize(("calm", "under_way"), [(4, [9.0]), (20, [])])
def test_without_a_pace_or_a_step_it_is_what_training_waited(calm: int, under_way: list[float]) -> None:
    assert metered(calm, under_way) == 0.01
