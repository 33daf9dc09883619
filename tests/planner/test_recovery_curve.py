import math
from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.recovery_curve import CostObservation, EndCostCurve, PaperCurve
from tests.planner.jobs import PHASE, end_cost

TRUTH = (-12.0, 0.7, 0.05)


def observe(curve: EndCostCurve, seed: int, count: int, scatter: float = 5.0) -> EndCostCurve:
    """So many recoveries of the truth, each with its own scatter."""
    generator = numpy.random.default_rng(seed)
    for _ in range(count):
        interval = float(generator.choice([20, 50, 100]))
        horizon = float(generator.uniform(1, interval))
        a, b, c = TRUTH
        value = a + b * horizon + c * interval + generator.normal(0, scatter)
        curve = curve.with_observation(CostObservation(horizon, interval, value))
    return curve


def at(curve: EndCostCurve, horizon: float, interval: float) -> float:
    return float(curve.end_cost_iterations(numpy.array([horizon]), interval)[0])


def test_one_measurement_by_hand() -> None:
    """With one coefficient free it is the mean of prior and measurement, weighted by their precisions."""
    curve = EndCostCurve.with_independent_prior((0.0, 0.0, 0.0), (10.0, 1e-9, 1e-9), 8.0)
    seen = curve.with_observation(CostObservation(30.0, 50.0, 5.0))
    scatter = 8.0**2
    for _ in range(3):
        mean = 5.0 / scatter / (1 / 100 + 1 / scatter)
        scatter = (4 * 64 + (5.0 - mean) ** 2) / 5
    assert at(seen, 30.0, 50.0) == pytest.approx(mean, rel=1e-6)


def test_it_learns_the_truth_from_many() -> None:
    curve = observe(end_cost(0.0, 1.0), seed=1, count=60)
    for horizon, interval in [(10.0, 20.0), (30.0, 50.0), (80.0, 100.0)]:
        row = numpy.array([1.0, horizon, interval])
        error = math.sqrt(row @ curve.covariance @ row)
        assert abs(at(curve, horizon, interval) - float(row @ TRUTH)) < 3 * error
        assert error < 2.0
    assert curve.source == "60 measured recoveries, on prior"


@given(
    st.lists(
        st.builds(CostObservation, st.floats(0, 500), st.floats(1, 500), st.floats(-1e4, 1e4)),
        max_size=6,
    )
)
def test_it_is_finite_whatever_was_seen(observations: list[CostObservation]) -> None:
    curve = end_cost(0.0, 1.0)
    for observation in observations:
        curve = curve.with_observation(observation)
    assert numpy.isfinite(curve.end_cost_iterations(numpy.array([1.0, 100.0]), 50.0)).all()
    assert (numpy.linalg.eigvalsh(curve.covariance) > 0).all()


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


def test_the_deviation_of_a_distant_failure_is_a_number() -> None:
    curve = EndCostCurve.with_independent_prior((1.0, 0.5, 0.1), (10.0, 0.1, 0.1), 20.0)
    assert curve.deviation_iterations(100.0, 10.0) == pytest.approx(math.sqrt(100 + 100 + 1))
    assert curve.deviation_iterations(1e200, 1e3) == pytest.approx(1e199)
