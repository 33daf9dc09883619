import csv
import json
import math
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import theilslopes

from cpsr.fitter.loss_fit import POINTS_MIN, LossFit, fit_loss, pair_slopes

Array = NDArray[numpy.float64]
NOISE = 0.12


def curve(t: Array) -> Array:
    return numpy.exp(1.2 - t / 4000)


def drawn(places: Array, seed: int) -> Array:
    return curve(places) + NOISE * numpy.random.default_rng(seed).normal(size=places.size)


def real_run() -> tuple[Array, Array]:
    """Training losses of a byte-level GPT over 2400 iterations at a constant learning rate."""
    with (Path(__file__).parent / "training_losses.csv").open(encoding="utf-8", newline="") as file:
        rows = [(float(row["iteration"]), float(row["loss_nats"])) for row in csv.DictReader(file)]
    iterations, losses = numpy.array(rows).T
    return iterations, losses


def test_an_exact_exponential_gives_its_own_coefficients() -> None:
    places = numpy.arange(100, 2000, 10)
    fit = fit_loss(places, numpy.exp(1.3 - 5e-4 * places))
    assert fit.alpha1_per_iteration == pytest.approx(5e-4)
    assert fit.alpha2 == pytest.approx(1.3)
    assert fit.band_nats < 1e-6


def test_a_loss_that_stands_still_or_rises_says_so() -> None:
    places = numpy.arange(200)
    still, rising = fit_loss(places, numpy.full(200, 2.0)), fit_loss(places, 1.0 + places / 100)
    assert still.alpha1_per_iteration == pytest.approx(0.0, abs=1e-12)
    assert still.alpha2 == pytest.approx(math.log(2.0))
    assert rising.alpha1_per_iteration == pytest.approx(-0.01 / 2.49, rel=0.02)  # halfway through the newest half


def test_spikes_move_the_forecast_by_less_than_the_noise() -> None:
    places = numpy.arange(1.0, 601)
    spiked = drawn(places, 1)
    spiked[numpy.random.default_rng(2).choice(600, 18, replace=False)] += 10.0
    fit, ahead = fit_loss(places, spiked), numpy.arange(601.0, 721)
    assert numpy.abs(fit.at(ahead) - curve(ahead)).max() < NOISE
    assert fit.band_nats == pytest.approx(2 * NOISE, rel=0.2)


def test_a_real_run_is_forecast_better_than_by_all_its_losses() -> None:
    iterations, losses = real_run()
    ours, plain = [], []
    for end in range(600, 2001, 200):
        known, ahead = iterations <= end, (iterations > end) & (iterations <= end + 200)
        fit = fit_loss(iterations[known], losses[known])
        line = numpy.polyfit(iterations[known], numpy.log(losses[known]), 1)
        ours.append(numpy.sqrt(numpy.mean((losses[ahead] - fit.at(iterations[ahead])) ** 2)))
        plain.append(numpy.sqrt(numpy.mean((losses[ahead] - numpy.exp(numpy.polyval(line, iterations[ahead]))) ** 2)))
    # A batch's own noise is 0.17 nats: there is little left to gain.
    assert numpy.mean(ours) < 0.19
    assert numpy.mean(ours) < 0.7 * numpy.mean(plain)


def test_a_million_losses_are_fitted_as_few_are() -> None:
    places = numpy.arange(1.0, 1_000_001)
    losses = numpy.exp(1.2 - places / 4e6) + NOISE * numpy.random.default_rng(0).normal(size=places.size)
    losses[::50] += 10.0
    fit = fit_loss(places, losses)
    assert (fit.first_iteration, fit.last_iteration, fit.points) == (500_001, 1_000_000, 500_000)
    assert fit.at(1_200_000) == pytest.approx(math.exp(0.9), abs=0.01)
    # Of single losses, not of the bins' medians.
    assert fit.band_nats == pytest.approx(2 * NOISE, rel=0.1)


@pytest.mark.parametrize(("count", "share"), [(10, 0.88), (20, 0.88), (40, 0.93), (1000, 0.94)])
def test_the_band_holds_other_losses_than_those_of_the_fit(count: int, share: float) -> None:
    held = []
    for seed in range(60):
        fit = fit_loss(numpy.arange(1.0, count + 1), drawn(numpy.arange(1.0, count + 1), seed))
        others = numpy.repeat(numpy.arange(fit.first_iteration, count + 1.0), 10)
        held.append(numpy.mean(numpy.abs(drawn(others, 1000 + seed) - fit.at(others)) <= fit.band_nats))
    assert share <= numpy.mean(held) <= 0.98


def test_the_band_of_a_real_run_holds_its_losses_from_the_beginning() -> None:
    iterations, losses = real_run()
    for count in (20, 60, 150, 300, 600):
        fit = fit_loss(iterations[:count], losses[:count])
        fitted = slice(count - fit.points, count)
        assert numpy.mean(numpy.abs(losses[fitted] - fit.at(iterations[fitted])) <= fit.band_nats) >= 0.9


def plain(fit: LossFit) -> dict[str, object]:
    """The journal's form, which has no NaN."""
    content: dict[str, object] = json.loads(json.dumps(fit.to_dict(), allow_nan=False))
    return content


@given(st.lists(st.floats(1e-4, 1e4), min_size=POINTS_MIN, max_size=40), st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_any_positive_losses_have_a_finite_curve(losses: list[float], start: int) -> None:
    fit = fit_loss(numpy.arange(start, start + len(losses)), losses)
    plain(fit)
    assert numpy.all(numpy.isfinite([fit.alpha1_per_iteration, fit.alpha2]))
    assert fit.at(fit.last_iteration) > 0


def test_what_is_no_curve_is_refused() -> None:
    places, losses = numpy.arange(20), numpy.full(20, 2.0)
    with pytest.raises(ValueError, match="needs 10 losses, and there are 9 so far"):
        fit_loss(places[:9], losses[:9])
    with pytest.raises(ValueError, match=r"\(20,\), \(19,\)"):
        fit_loss(places, losses[:19])
    with pytest.raises(ValueError, match="ascend"):
        fit_loss(places[::-1], losses)
    for wrong in (math.nan, math.inf, 0.0, -1.0):
        losses[7] = wrong
        with pytest.raises(ValueError, match="the loss at iteration 7 is"):
            fit_loss(places, losses)


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(-1e3, 1e3)), min_size=2, max_size=30))
def test_the_median_slope_is_that_of_scipy(points: list[tuple[int, float]]) -> None:
    places, values = numpy.array(points, dtype=numpy.float64).T
    if len(set(places)) > 1:
        assert numpy.median(pair_slopes(places, values)) == pytest.approx(theilslopes(values, places).slope)


def test_where_most_losses_lie_on_a_curve_it_is_theirs() -> None:
    places = numpy.arange(1.0, 41)
    losses = curve(places)
    losses[3::5] += [1.0, 7.0, 40.0, 3.0, 40.0, 2.0, 9.0, 0.5]
    fit = fit_loss(places, losses)
    assert (fit.alpha1_per_iteration, fit.alpha2) == pytest.approx((1 / 4000, 1.2))
