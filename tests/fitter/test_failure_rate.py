import json
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.fitter.failure_rate import FailureRate

HOUR = 3600.0


def test_without_exposure_it_is_the_prior() -> None:
    rate = FailureRate(prior_mtbf_hours=12.0)
    assert rate.mean_per_second == pytest.approx(1 / (12 * HOUR))
    assert rate.mtbf_hours == pytest.approx(12.0)
    low, high = rate.interval_per_second()
    # One failure's worth of knowledge is an exponential distribution, whose quantiles are logarithms.
    assert low == pytest.approx(-math.log(0.975) / (12 * HOUR))
    assert high == pytest.approx(-math.log(0.025) / (12 * HOUR))


def test_long_exposure_outweighs_the_prior() -> None:
    rate = FailureRate(prior_mtbf_hours=12.0, failures=1000, exposure_seconds=2000 * HOUR)
    assert rate.mtbf_hours == pytest.approx(2.0, rel=0.01)
    heavy = FailureRate(prior_mtbf_hours=12.0, prior_failures=1000, failures=1000, exposure_seconds=2000 * HOUR)
    assert heavy.mtbf_hours == pytest.approx(7.0)  # as many failures in 12,000 hours as in 2,000


def test_time_without_failures_lowers_the_rate_and_a_failure_raises_it() -> None:
    start = FailureRate(12.0)
    quiet, unlucky = FailureRate(12.0, exposure_seconds=HOUR), FailureRate(12.0, failures=1, exposure_seconds=HOUR)
    assert quiet.mean_per_second < start.mean_per_second < unlucky.mean_per_second


def test_the_interval_holds_its_share_of_rates_drawn_from_the_prior() -> None:
    random, covered = numpy.random.default_rng(0), []
    for _ in range(1000):
        true_rate = random.gamma(2.0, 1 / (2 * 12 * HOUR))
        failures = int(random.poisson(true_rate * 40 * HOUR))
        low, high = FailureRate(12.0, 2.0, failures, 40 * HOUR).interval_per_second(0.8)
        covered.append(low <= true_rate <= high)
    assert numpy.mean(covered) == pytest.approx(0.8, abs=0.04)  # three standard errors of 1000 draws


@given(st.floats(1e-3, 1e6), st.floats(0.01, 1000), st.integers(0, 10**6), st.floats(0, 1e10))
def test_the_mean_is_inside_the_interval_and_json(mtbf: float, weight: float, failures: int, seconds: float) -> None:
    rate = FailureRate(mtbf, weight, failures, seconds)
    content = json.loads(json.dumps(rate.to_dict(), allow_nan=False))
    assert content["mean_per_second"] == rate.mean_per_second > 0
    assert 0 <= content["low_per_second"] < content["high_per_second"]
    if rate.shape >= 1:  # below it the distribution is so skewed that its mean can lie beyond a quantile
        assert content["low_per_second"] <= content["mean_per_second"] <= content["high_per_second"]
    assert (content["failures"], content["exposure_seconds"]) == (failures, seconds)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"prior_mtbf_hours": 0.0}, "prior_mtbf_hours"),
        ({"prior_mtbf_hours": math.inf}, "prior_mtbf_hours"),
        ({"prior_mtbf_hours": 1.0, "prior_failures": 0.0}, "prior_failures"),
        ({"prior_mtbf_hours": 1.0, "failures": -1}, "failures"),
        ({"prior_mtbf_hours": 1.0, "exposure_seconds": math.nan}, "exposure_seconds"),
    ],
)
def test_numbers_out_of_range_are_named(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        FailureRate(**arguments)


def test_a_confidence_out_of_range_is_refused() -> None:
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="between 0 and 1"):
            FailureRate(1.0).interval_per_second(confidence)
