import json

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.fitter.accuracy import AccuracyCurve, Backtest, fit_accuracy

TAU1, TAU2 = 0.03, -8.0
HORIZON = 100
SEEDS = st.integers(0, 10_000)


def backtests(
    interval: int, first: int, last: int, tau1: float = TAU1, noise: float = 0.0, seed: int = 0
) -> list[Backtest]:
    """Of checkpoints every so many iterations, at the nearest horizons below and above 100."""
    generator, found = numpy.random.default_rng(seed), list[Backtest]()
    for count, iteration in enumerate(range(first, last, interval), start=1):
        off = float(numpy.exp(generator.normal(0.0, noise)))
        below, above = max(100 // interval, 1) * interval, -(-100 // interval) * interval
        for horizon in sorted({below, above}):
            found.append(
                Backtest(iteration, count, horizon, off * horizon / 100 * float(numpy.exp(TAU2 - tau1 * count)))
            )
    return found


def certain(curve: AccuracyCurve) -> bool:
    return curve.tau1_low_per_checkpoint > 0 or curve.tau1_high_per_checkpoint < 0


@given(st.floats(-0.2, 0.2), st.sampled_from([10, 30, 77, 100, 200, 500]))
def test_an_exact_curve_is_found_at_any_interval(tau1: float, interval: int) -> None:
    curve = fit_accuracy(backtests(interval, interval, 12 * max(interval, 100), tau1)[::-1], HORIZON)
    assert curve.tau1_per_checkpoint == pytest.approx(tau1, abs=0.01)
    assert curve.tau2 == pytest.approx(TAU2, abs=0.6)  # between two horizons the error is interpolated
    assert curve.tau1_low_per_checkpoint <= curve.tau1_per_checkpoint <= curve.tau1_high_per_checkpoint
    assert json.loads(json.dumps(curve.to_dict(), allow_nan=False))["points"] >= 5


def test_a_longer_interval_is_no_larger_error() -> None:
    """From 20 to 500 iterations the raw errors grow fivefold: compared at one horizon they do not."""
    short = backtests(20, 20, 1500, tau1=0.0, noise=0.05)
    longer = [
        Backtest(at, 75 + place, 500, 5 * float(numpy.exp(TAU2))) for place, at in enumerate(range(2000, 5000, 500))
    ]
    curve = fit_accuracy(short + longer, HORIZON)
    assert curve.tau1_per_checkpoint == pytest.approx(0.0, abs=1e-3)
    assert curve.tau2 == pytest.approx(TAU2, abs=0.05)


def test_a_few_predictions_that_failed_move_it_little() -> None:
    ones = backtests(50, 50, 2000, noise=0.1)
    for place in (5, 17, 30):
        ones[place] = Backtest(ones[place].iteration, ones[place].checkpoints, 100, 1000.0)
    curve = fit_accuracy(ones, HORIZON)
    assert curve.tau1_per_checkpoint == pytest.approx(TAU1, abs=0.01)
    assert certain(curve)


def test_by_chance_a_slope_of_zero_is_rarely_anything_else() -> None:
    curves = [fit_accuracy(backtests(100, 100, 2100, tau1=0.0, noise=0.3, seed=seed), HORIZON) for seed in range(200)]
    assert sum(map(certain, curves)) <= 20  # 10 of 200 are expected, and 3.1 either way


@given(SEEDS)
def test_what_overlaps_counts_once(seed: int) -> None:
    """Ten checkpoints within a hundred iterations tell as much as one: they share most of their horizon."""
    curve = fit_accuracy(backtests(10, 10, 1000, noise=0.2, seed=seed), HORIZON)
    assert curve.points == 10


def test_too_little_is_refused() -> None:
    for ones in (
        [],
        backtests(10, 10, 390),
        backtests(500, 500, 2400),
        [Backtest(100 * k, 7, 100, 1.0) for k in range(9)],
    ):
        with pytest.raises(ValueError, match="too few for an interval yet"):
            fit_accuracy(ones, HORIZON)
