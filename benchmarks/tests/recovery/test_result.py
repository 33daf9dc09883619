"""Means over failures, their intervals over training runs, and verdicts."""

import dataclasses

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cpsr.benchmarks.recovery.grid import Cell, Point
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.result import Mean, Sample, cell_results, grid_mean, summarise, verdict
from cpsr.benchmarks.tests.recovery.tiny import SELECTION, TINY

HORIZON = 40


def outcome(method: str, cost: float | None, checkpoint: int, seed: int = 0, predicted: bool = True) -> Outcome:
    return Outcome(
        method,
        seed,
        Point(50, 0.5, checkpoint, checkpoint + HORIZON),
        predicted,
        reason="",
        final_gap_nats=None if cost is None else 0.0,
        repeated_iterations=0,
        end_cost_iterations=cost,
    )


def samples(values: list[float], workload: str = "tiny") -> list[Sample]:
    """One value a seed."""
    return [Sample(workload, seed, value) for seed, value in enumerate(values)]


def test_a_cell_divides_each_cost_by_its_horizon_and_pairs_by_failure() -> None:
    costs = [(10.0, 30.0), (-10.0, 20.0), (20.0, 34.0), (0.0, 16.0)]
    of = [outcome("line", line, 500 + 100 * seed, seed) for seed, (line, _) in enumerate(costs)]
    of += [outcome("stale", stale, 500 + 100 * seed, seed) for seed, (_, stale) in reversed([*enumerate(costs)])]
    line, stale = cell_results(Cell("tiny", 50, 0.5), of)
    assert (line.method, line.points) == ("line", 4)
    assert line.end_cost.value == pytest.approx(0.125)
    assert line.against_stale is not None
    assert line.against_stale.value == pytest.approx(-20 / 40)
    assert line.verdicts == {"recompute": "better", "stale": "better"}
    assert stale.verdicts == {"recompute": "better"}


def test_a_diverged_recovery_is_counted_and_forbids_a_verdict() -> None:
    of = [outcome("line", 10.0, 500, seed) for seed in range(4)] + [outcome("line", None, 700)]
    (line,) = cell_results(Cell("tiny", 50, 0.5), of)
    assert (line.points, line.diverged, line.end_cost.value) == (4, 1, 0.25)
    assert line.verdicts == {"recompute": "undetermined"}
    asked = dataclasses.replace(SELECTION, intervals=(50,), fractions=(0.5,), methods=("line",))
    whole = summarise(asked, {TINY.name: of}, {}).mean("line")
    assert whole is not None
    assert (whole.end_cost.value, whole.of_all_horizons) == (0.25, 0.25)


def test_what_was_declined_is_counted_and_costs_the_horizon() -> None:
    of = [outcome("line", float(HORIZON), 500, seed, predicted=False) for seed in range(4)]
    (line,) = cell_results(Cell("tiny", 50, 0.5), of)
    assert (line.declined, line.end_cost.value, line.verdicts) == (4, 1.0, {"recompute": "not worse"})


def test_failures_of_one_seed_count_as_one() -> None:
    values = [1.0, 2.0, 4.0]
    once = grid_mean([samples(values)])
    often = grid_mean([[Sample("tiny", seed, value) for seed, value in enumerate(values) for _ in range(20)]])
    assert (often.value, often.low, often.high) == pytest.approx((once.value, once.low, once.high))
    low, high = stats.t.interval(0.95, 2, numpy.mean(values), stats.sem(values))
    assert (once.low, once.high) == pytest.approx((low, high))


def test_two_seeds_give_no_interval_and_no_verdict() -> None:
    mean = grid_mean([samples([0.0, 0.0])])
    assert mean == Mean(0.0, None, None)
    assert verdict(mean) == "undetermined"
    with pytest.raises(ValueError, match="no samples"):
        grid_mean([[]])


def test_cells_of_a_grid_count_alike_and_share_the_luck_of_their_run() -> None:
    many = [Sample("tiny", seed, 1.0 + seed) for seed in range(3) for _ in range(30)]
    few = [Sample("tiny", seed, float(seed)) for seed in range(3)]
    both = grid_mean([many, few])
    assert both.value == pytest.approx(1.5)
    alone = grid_mean([few])
    assert both.high is not None
    assert alone.high is not None
    assert both.high - both.value == pytest.approx(alone.high - alone.value)  # not narrower: the same three runs


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=6), st.lists(st.floats(-5, 5), min_size=3, max_size=6))
def test_an_interval_over_workloads_lies_around_its_mean(one: list[float], two: list[float]) -> None:
    both = grid_mean([samples(one), samples(two, "other")])
    assert both.value == pytest.approx((numpy.mean(one) + numpy.mean(two)) / 2, abs=1e-9)
    assert both.low is not None
    assert both.high is not None
    assert both.low <= both.value <= both.high


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.01, 0.3, "worse"), (-0.3, -0.01, "better"), (-0.2, 0.1, "not worse"), (-0.2, 0.11, "undetermined")],
)
def test_verdicts_follow_the_interval(low: float, high: float, expected: str) -> None:
    assert verdict(Mean(0.0, low, high)) == expected
    assert verdict(Mean(0.0, low, high), missing=1) == "undetermined"
