"""Means over failures, and their intervals over training runs."""

import dataclasses

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cpsr.benchmarks.recovery.grid import Cell, Point
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.result import Group, Mean, Sample, differences, mean_of, summarise
from cpsr.benchmarks.tests.recovery.tiny import SELECTION, TINY

HORIZON = 40
CELL = Cell("tiny", 50, 0.5)


def outcome(method: str, cost: float | None, checkpoint: int, seed: int = 0) -> Outcome:
    point = Point(50, 0.5, checkpoint, checkpoint + HORIZON)
    return Outcome(method, TINY.name, seed, point, cost != HORIZON, "", None if cost is None else 0.0, cost)


def samples(values: list[float], cell: Cell = CELL, often: int = 1) -> list[Sample]:
    """One value a seed, as often as that."""
    return [Sample(cell, seed, value) for seed, value in enumerate(values) for _ in range(often)]


def test_costs_are_divided_by_the_horizon_counted_and_paired_by_failure() -> None:
    costs = [(10.0, 30.0), (-10.0, 20.0), (20.0, 34.0), (40.0, 16.0)]
    of = [outcome("line", line, 500 + 100 * seed, seed) for seed, (line, _) in enumerate(costs)]
    of += [outcome("stale", stale, 500 + 100 * seed, seed) for seed, (_, stale) in reversed([*enumerate(costs)])]
    of.append(outcome("line", None, 900))
    asked = dataclasses.replace(SELECTION, intervals=(50,), fractions=(0.5,), methods=("line", "stale"))
    means = summarise(asked, of)
    for group in (Group("line"), Group("line", "all", TINY.name, 0.5, 50)):
        line = means[group]
        assert (line.cells, line.diverged, line.declined) == (1, 1, 1)
        assert (line.end_cost.value, line.of_all_horizons) == pytest.approx((0.375, 0.375))
    assert mean_of(differences(of, "line", "stale")).value == pytest.approx(-10 / HORIZON)


def test_failures_of_one_seed_count_as_one() -> None:
    values = [1.0, 2.0, 4.0]
    once, often = mean_of(samples(values)), mean_of(samples(values, often=20))
    assert (often.value, often.low, often.high) == pytest.approx((once.value, once.low, once.high))
    low, high = stats.t.interval(0.95, 2, numpy.mean(values), stats.sem(values))
    assert (once.low, once.high) == pytest.approx((low, high))


def test_two_seeds_give_no_interval() -> None:
    assert mean_of(samples([0.0, 0.0])) == Mean(0.0, None, None)
    with pytest.raises(ValueError, match="no samples"):
        mean_of([])


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=6), st.lists(st.floats(-5, 5), min_size=3, max_size=6))
def test_an_interval_over_workloads_lies_around_its_mean(one: list[float], two: list[float]) -> None:
    both = mean_of(samples(one) + samples(two, Cell("other", 50, 0.5)))
    assert both.value == pytest.approx((numpy.mean(one) + numpy.mean(two)) / 2, abs=1e-9)
    assert both.low is not None
    assert both.high is not None
    assert both.low <= both.value <= both.high
