import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.calibration import (
    HORIZON_ITERATIONS,
    LOWEST_RATE,
    MOVE_TERMS,
    REACH_OF_WINDOW,
    SKIP_TERMS,
    STALE,
    YOUNGEST_ITERATIONS,
    Context,
    Curve,
    Setting,
    Table,
    candidates,
    context_of,
    table,
    windows,
)
from cpsr.predictor.protocol import HistoryEntry, Target

CONTEXT = Context(horizon_iterations=42, age_iterations=1500, learning_rate_ratio=1.0)
DECAYED = replace(CONTEXT, learning_rate_ratio=0.5)
SETTING = Setting(window_iterations=300, reach_iterations=120)


def small_table(turning_deviation: float = 0.0) -> Table:
    """A skip costs what is skipped at the full rate, and following the line is expected to save half of the reach."""
    skip, move = numpy.zeros(len(SKIP_TERMS)), numpy.zeros(len(MOVE_TERMS))
    skip[SKIP_TERMS.index("u * rate")], move[MOVE_TERMS.index("reach")] = 1.0, -0.5
    covariance = numpy.zeros((len(move), len(move)))
    turning = MOVE_TERMS.index("reach * (reach + window) / age")
    covariance[turning, turning] = turning_deviation**2
    return Table(Curve(skip, 0.01 * numpy.eye(len(skip)), 2.0), Curve(move, covariance, 1.0), {"recoveries": 3})


def test_skip_and_move_add_up() -> None:
    prior = small_table(turning_deviation=0.05)
    found = prior.expected(CONTEXT, SETTING)
    assert (found.skip_iterations, found.move_iterations) == (42.0, -60.0)
    assert found.end_cost_iterations == -18.0
    stale = prior.expected(CONTEXT, STALE)
    assert (stale.end_cost_iterations, stale.move_iterations) == (42.0, 0.0)
    assert found.deviation_iterations == pytest.approx(math.hypot(stale.deviation_iterations, 0.05 * 120 * 420 / 1500))


def test_a_part_of_the_state_costs_less_than_its_share_and_is_as_uncertain() -> None:
    whole, part = (small_table(0.05).expected(replace(CONTEXT, lost_share=share), SETTING) for share in (1.0, 0.25))
    assert (part.skip_iterations, part.move_iterations) == (42.0 / 16, -15.0)
    assert part.deviation_iterations == pytest.approx(0.25 * whole.deviation_iterations)


@pytest.mark.parametrize(
    "beyond", [{"age_iterations": YOUNGEST_ITERATIONS - 1}, {"horizon_iterations": HORIZON_ITERATIONS + 1}]
)
@pytest.mark.parametrize("setting", [STALE, SETTING])
def test_beyond_what_was_measured_nothing_costs_less_than_recomputing(beyond: dict[str, int], setting: Setting) -> None:
    context = replace(CONTEXT, straightness=0.9, learning_rate_ratio=0.5, lost_share=0.1, **beyond)
    assert table().expected(context, setting).bound(0.5) >= context.horizon_iterations


def test_a_move_gains_nothing_at_a_rate_that_was_not_measured() -> None:
    low, lower = (
        replace(CONTEXT, learning_rate_ratio=rate, straightness=0.9) for rate in (LOWEST_RATE, LOWEST_RATE / 2)
    )
    assert table().expected(low, SETTING).move_iterations < 0.0 <= table().expected(lower, SETTING).move_iterations


def test_the_lowest_expectation_among_the_safe_settings_is_chosen() -> None:
    prior, young = small_table(turning_deviation=0.5), replace(CONTEXT, age_iterations=600)
    near, far, reckless = (replace(SETTING, reach_iterations=reach) for reach in (20.0, 40.0, 400.0))
    bounds = [prior.expected(young, setting).bound(1.0) for setting in (near, far, reckless)]
    assert max(bounds[:2]) < young.horizon_iterations < bounds[2]
    assert prior.best(young, [STALE, near, far, reckless], 1.0)[0] == far


def test_the_network_is_followed_where_the_rate_has_decayed() -> None:
    late = replace(CONTEXT, learning_rate_ratio=0.1)
    both = candidates(late, [300], directions=("line", "vitp"))
    assert table().best(late, both, 0.5)[0].direction == "vitp"
    assert table().takes("vitp"), "what is followed is trained for"
    assert {one.direction for one in candidates(late, [300])} == {"line"}


def test_the_table_is_read_as_it_was_written() -> None:
    written = table().to_json()
    assert Table.from_json(written).to_json() == written
    with pytest.raises(ValueError, match="version 3"):
        Table.from_json('{"version": 3}')


def test_the_shipped_table_is_usable() -> None:
    shipped = table()
    for curve, terms in ((shipped.skip, SKIP_TERMS), (shipped.move, MOVE_TERMS)):
        assert curve.mean.shape == (len(terms),)
        assert numpy.linalg.eigvalsh(curve.covariance).min() > 0.0
        assert 1.0 <= curve.lost_exponent <= 3.0
    assert shipped.source["score"] == "end cost"
    assert 0.5 * 42 < shipped.expected(DECAYED, STALE).end_cost_iterations < 1.5 * 42
    late = replace(CONTEXT, learning_rate_ratio=0.1)
    assert shipped.expected(late, STALE).bound(1.0) < 42, "late in a cosine a skip costs less than recomputing"


PEAK = 1e-3
RUN = 3000


def cosine(iteration: int) -> float:
    return PEAK * 0.5 * (1 + math.cos(math.pi * iteration / RUN))


def series(newest: int, interval: int, count: int = 100) -> list[HistoryEntry]:
    iterations = range(max(newest - (count - 1) * interval, newest % interval), newest + 1, interval)
    return [HistoryEntry(iteration, float(iteration), cosine(iteration)) for iteration in iterations]


@pytest.mark.parametrize(
    ("newest", "interval", "count", "expected"),
    [
        (1500, 50, 100, [100, 150, 200, 300]),
        (1500, 50, 6, [100, 150, 200]),  # five intervals are there
        (60, 20, 4, [40]),  # less than the smallest window, but three checkpoints
        (900, 300, 4, [600]),  # three checkpoints, further apart than the largest window
    ],
)
def test_windows_hold_three_checkpoints_and_no_more_than_there_is(
    newest: int, interval: int, count: int, expected: list[int]
) -> None:
    assert windows(series(newest, interval, count)) == expected


def test_without_a_line_there_is_the_checkpoint() -> None:
    context = context_of(Target(30, 20.0 + 5 * PEAK, PEAK, 0.5), HistoryEntry(20, 20.0, PEAK / 2))
    assert context == Context(10.0, 20.0, 0.5, lost_share=0.5)
    assert candidates(context, []) == [STALE]


def test_a_rate_that_rises_after_the_checkpoint_is_that_of_the_skipped_iterations() -> None:
    warm = context_of(Target(1150, 10.0 + 135 * PEAK, PEAK), HistoryEntry(1000, 10.0, 0.0))
    assert warm.learning_rate_ratio == pytest.approx(0.9)
    falling = context_of(Target(1150, 10.0 + 15 * PEAK, PEAK), HistoryEntry(1000, 10.0, PEAK / 5))
    assert falling.learning_rate_ratio == 0.2


@given(st.integers(3, 40), st.integers(1, 400), st.integers(1, 300))
def test_every_setting_has_its_window(count: int, interval: int, horizon: int) -> None:
    entries = [HistoryEntry(place * interval, float(place), PEAK) for place in range(1, count + 1)]
    target = Target(entries[-1].iteration + horizon, float(count + 1), PEAK)
    stale, *moves = candidates(context_of(target, entries[-1]), windows(entries))
    assert stale == STALE
    assert moves
    for setting in moves:
        assert 0.0 < setting.reach_iterations <= REACH_OF_WINDOW[-1] * setting.window_iterations
        fits = [entry for entry in entries if entry.iteration >= entries[-1].iteration - setting.window_iterations]
        assert len(fits) >= 3
