import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.recovery_curve import PaperCurve
from tests.planner.jobs import PHASE, end_cost


def test_refused_predictions_cost_what_they_repeat() -> None:
    """Of ten predictions two are vetoed and one is rolled back after 60 iterations."""
    kept = end_cost(-12.0, 0.7, 0.05)
    curve = kept.with_refusals(0.2, 0.1, 60)
    horizons, interval = numpy.array([0.0, 30.0, 80.0]), 100.0
    expected = 0.7 * kept.end_cost_iterations(horizons, interval) + 0.2 * horizons + 0.1 * (horizons + 60)
    assert curve.end_cost_iterations(horizons, interval) == pytest.approx(expected)
    assert kept.with_refusals(0.0, 0.0, 60) == kept


def test_the_papers_curve_is_its_equation_at_one_moment() -> None:
    moment = replace(PHASE, first_iteration=2000, last_iteration=2000)
    x0 = 1e-6 * 355e6 * math.exp(-9 - 1.8) / 2
    expected = math.log(1 + x0 * math.exp((3e-4 - 0.05 / 100) * 2000)) / 3e-4
    found = PaperCurve(moment).end_cost_iterations(numpy.array([10.0, 60.0]), 100.0)
    assert found == pytest.approx([expected, expected])


def test_the_papers_curve_is_averaged_over_the_phase() -> None:
    moments = [replace(PHASE, first_iteration=t, last_iteration=t) for t in range(1000, 3001)]
    mean = numpy.mean([PaperCurve(moment).end_cost_iterations(numpy.array([1.0]), 60.0)[0] for moment in moments])
    assert PaperCurve(PHASE).end_cost_iterations(numpy.array([1.0]), 60.0)[0] == pytest.approx(mean, rel=1e-3)


@given(st.floats(1e-6, 1e-2), st.floats(-50, 50), st.floats(1e-3, 10), st.floats(-50, 50), st.integers(0, 10**12))
def test_the_papers_curve_rises_with_the_interval_and_is_finite(
    alpha1: float, alpha2: float, tau1: float, tau2: float, parameters: int
) -> None:
    phase = replace(
        PHASE,
        alpha1_per_iteration=alpha1,
        alpha2=alpha2,
        tau1_per_checkpoint=tau1,
        tau2=tau2,
        parameters=parameters,
    )
    lags = PaperCurve(phase).end_cost_iterations(numpy.ones(5), numpy.array([1.0, 10.0, 100.0, 1000.0, 1e9]))
    assert numpy.isfinite(lags).all()
    assert (lags >= 0).all()
    assert (numpy.diff(lags) >= -1e-9 * lags[1:]).all()
