import csv
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpsr.fitter.loss_fit import POINTS_MIN, LossFit, fit_loss

Array = NDArray[numpy.float64]
NOISE = 0.12

TRUTHS: dict[str, Callable[[Array], Array]] = {
    "exponential": lambda t: numpy.exp(1.2 - t / 4000),
    "power_law": lambda t: 1.5 + 30 * (t + 30.0) ** -0.5,
    "stretched_exponential": lambda t: 1.6 + 2.5 * numpy.exp(-((t / 300) ** 0.6)),
    "flat": lambda t: numpy.full(t.shape, 2.0),
    "rising": lambda t: 1.0 + t / 1000,
}


def drawn(truth: Callable[[Array], Array], places: Array, seed: int) -> Array:
    return truth(places) + NOISE * numpy.random.default_rng(seed).normal(size=places.size)


def real_run() -> tuple[Array, Array]:
    """Training losses of a byte-level GPT over 2400 iterations at a constant learning rate."""
    with (Path(__file__).parent / "training_losses.csv").open(encoding="utf-8", newline="") as file:
        rows = [(float(row["iteration"]), float(row["loss_nats"])) for row in csv.DictReader(file)]
    iterations, losses = numpy.array(rows).T
    return iterations, losses


@pytest.mark.parametrize("name", sorted(TRUTHS))
def test_the_next_span_is_forecast_and_the_band_holds_its_share(name: str) -> None:
    truth, inside, missed = TRUTHS[name], [], []
    places, ahead = numpy.arange(3.0, 1201, 3), numpy.arange(1203.0, 1441, 3)
    for seed in range(16):
        fit = fit_loss(places, drawn(truth, places, seed))
        low, high = fit.band(ahead)
        losses = drawn(truth, ahead, 1000 + seed)
        inside.append(numpy.mean((low <= losses) & (losses <= high)))
        missed.append(float(numpy.abs(fit.at(ahead) - truth(ahead)).mean()))
    assert 0.92 <= numpy.mean(inside) <= 0.98
    assert numpy.mean(missed) < 0.5 * NOISE


def test_the_bands_nest_and_widen_ahead() -> None:
    places = numpy.arange(1.0, 401)
    fit = fit_loss(places, drawn(TRUTHS["power_law"], places, 0))
    ahead = numpy.array([[400, 500], [700, 1000]])
    half, nearly_all = fit.band(ahead, 0.5), fit.band(ahead, 0.99)
    assert half[0].shape == (2, 2)
    assert numpy.all(nearly_all[0] < half[0])
    assert numpy.all(half[1] < nearly_all[1])
    widths = (half[1] - half[0]).ravel()
    assert numpy.all(numpy.diff(widths) > 0)


def test_an_exact_exponential_gives_its_own_coefficients() -> None:
    places = numpy.arange(100, 2000, 10)
    fit = fit_loss(places, numpy.exp(1.3 - 5e-4 * places))
    assert fit.family == "exponential"
    assert fit.alpha1_per_iteration == pytest.approx(5e-4)
    assert fit.alpha2 == pytest.approx(1.3)
    assert fit.rmse_nats < 1e-6


def test_a_loss_that_stands_still_or_rises_says_so() -> None:
    places = numpy.arange(200)
    still, rising = fit_loss(places, numpy.full(200, 2.0)), fit_loss(places, 1.0 + places / 100)
    assert still.alpha1_per_iteration == pytest.approx(0.0, abs=1e-12)
    assert still.alpha2 == pytest.approx(math.log(2.0))
    assert rising.alpha1_per_iteration == pytest.approx(-0.01 / 2.99, rel=0.05)


@pytest.mark.parametrize("name", ["exponential", "power_law", "stretched_exponential"])
def test_spikes_move_the_forecast_by_less_than_the_noise(name: str) -> None:
    truth, places = TRUTHS[name], numpy.arange(1.0, 601)
    clean = drawn(truth, places, 1)
    spiked = clean.copy()
    spiked[numpy.random.default_rng(2).choice(600, 18, replace=False)] += 10.0
    ahead = numpy.arange(601.0, 721)
    assert numpy.abs(fit_loss(places, spiked).at(ahead) - truth(ahead)).max() < NOISE


def test_a_real_run_is_forecast_better_than_by_one_exponential() -> None:
    iterations, losses = real_run()
    ours, plain, inside = [], [], []
    for end in range(600, 2001, 200):
        known, ahead = iterations <= end, (iterations > end) & (iterations <= end + 200)
        fit = fit_loss(iterations[known], losses[known], span_iterations=200)
        missed = losses[ahead] - fit.at(iterations[ahead])
        low, high = fit.band(iterations[ahead])
        line = numpy.polyfit(iterations[known], numpy.log(losses[known]), 1)
        ours.append(numpy.sqrt(numpy.mean(missed**2)))
        plain.append(numpy.sqrt(numpy.mean((losses[ahead] - numpy.exp(numpy.polyval(line, iterations[ahead]))) ** 2)))
        inside.append(numpy.mean((low <= losses[ahead]) & (losses[ahead] <= high)))
        assert fit.held_out_iterations == 200
    # A batch's own noise is 0.17 nats: there is little left to gain.
    assert numpy.mean(ours) < 0.19
    assert numpy.mean(ours) < 0.7 * numpy.mean(plain)
    assert 0.9 < numpy.mean(inside) < 0.99


def test_a_million_losses_are_fitted_as_few_are() -> None:
    places = numpy.arange(1.0, 1_000_001)

    def truth(t: Array) -> Array:
        return 1.5 + 30 * (t + 3000.0) ** -0.4

    losses = drawn(truth, places, 0)
    losses[::50] += 10.0
    fit = fit_loss(places, losses)
    assert fit.points == 1_000_000
    assert (fit.first_iteration, fit.last_iteration) == (1, 1_000_000)
    ahead = numpy.array([1_000_000.0, 1_200_000.0])
    assert fit.at(ahead) == pytest.approx(truth(ahead), abs=0.01)
    # Of single losses, not of the bins' medians; a spike at each fiftieth is part of the noise.
    assert fit.noise_nats == pytest.approx(NOISE, rel=0.2)
    assert fit.rmse_nats == pytest.approx(math.sqrt(NOISE**2 + 100 / 50), rel=0.05)


def plain(fit: LossFit) -> dict[str, object]:
    """The journal's form, which has no NaN."""
    content: dict[str, object] = json.loads(json.dumps(fit.to_dict(), allow_nan=False))
    return content


@given(st.lists(st.floats(1e-4, 1e4), min_size=POINTS_MIN, max_size=40), st.integers(0, 10**6), st.integers(1, 10**6))
@settings(max_examples=15, deadline=None)
def test_any_positive_losses_have_a_finite_curve(losses: list[float], start: int, span: int) -> None:
    fit = fit_loss(numpy.arange(start, start + len(losses)), losses, span_iterations=span)
    plain(fit)
    assert numpy.all(numpy.isfinite(fit.band([start, start + 2 * len(losses)])))
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
    for span in (0, -5):
        with pytest.raises(ValueError, match=f"span_iterations must be positive, not {span}"):
            fit_loss(places, losses, span_iterations=span)
    for wrong in (math.nan, math.inf, 0.0, -1.0):
        losses[7] = wrong
        with pytest.raises(ValueError, match="the loss at iteration 7 is"):
            fit_loss(places, losses)


def test_the_first_fit_of_a_process_leaves_the_random_states_alone() -> None:
    """It imports scikit-learn in the planner's thread, while the training draws."""
    script = """
import random, numpy, torch
from cpsr.fitter.loss_fit import robust_line
states = lambda: repr((random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist()))
before, x = states(), numpy.linspace(0.1, 1.0, 30)
robust_line(x, numpy.sin(9 * x), numpy.ones(30))
assert states() == before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
