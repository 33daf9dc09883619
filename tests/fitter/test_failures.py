import json
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.fitter.failures import PRIOR_SHARES, FailureClasses, FailureRate
from cpsr.journal import FailureScope

HOUR = 3600.0


def classes(seen: dict[FailureScope, int], unknown: int = 0, hours: float = 0.0, weight: float = 1.0) -> FailureClasses:
    return FailureClasses(FailureRate(12.0, weight, sum(seen.values()) + unknown, hours * HOUR), seen)


def test_without_exposure_it_is_the_prior() -> None:
    rate = FailureRate(prior_mtbf_hours=12.0)
    assert rate.mtbf_hours == pytest.approx(12.0)
    low, high = rate.interval_per_second()
    # One failure's worth of knowledge is an exponential distribution, whose quantiles are logarithms.
    assert low == pytest.approx(-math.log(0.975) / (12 * HOUR))
    assert high == pytest.approx(-math.log(0.025) / (12 * HOUR))


def test_exposure_outweighs_the_prior_and_a_failure_raises_the_rate() -> None:
    assert FailureRate(12.0, 1.0, 1000, 2000 * HOUR).mtbf_hours == pytest.approx(2.0, rel=0.01)
    assert FailureRate(12.0, 1000.0, 1000, 2000 * HOUR).mtbf_hours == pytest.approx(7.0)
    rates = [FailureRate(12.0, exposure_seconds=HOUR), FailureRate(12.0), FailureRate(12.0, 1.0, 1, HOUR)]
    assert [rate.mean_per_second for rate in rates] == sorted(rate.mean_per_second for rate in rates)


def test_the_interval_holds_its_share_of_rates_drawn_from_the_prior() -> None:
    random, covered = numpy.random.default_rng(0), []
    for _ in range(1000):
        true_rate = random.gamma(2.0, 1 / (2 * 12 * HOUR))
        failures = int(random.poisson(true_rate * 40 * HOUR))
        low, high = FailureRate(12.0, 2.0, failures, 40 * HOUR).interval_per_second()
        covered.append(low <= true_rate <= high)
    assert numpy.mean(covered) == pytest.approx(0.95, abs=0.021)  # three standard errors of 1000 draws


def test_before_any_failure_the_shares_are_those_of_the_prior() -> None:
    assert sum(PRIOR_SHARES.values()) == pytest.approx(1.0)
    for scope, share in PRIOR_SHARES.items():
        assert classes({}).share(scope) == share


@given(
    st.dictionaries(st.sampled_from(sorted(PRIOR_SHARES)), st.integers(0, 1000)),
    st.integers(0, 1000),
    st.floats(0.0, 1e5),
    st.floats(0.01, 1e3),
)
def test_the_classes_add_up_to_the_job_whatever_is_not_known(
    seen: dict[FailureScope, int], unknown: int, hours: float, weight: float
) -> None:
    found = classes(seen, unknown, hours, weight)
    assert sum(found.share(scope) for scope in PRIOR_SHARES) == pytest.approx(1.0)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["classes"].keys() == PRIOR_SHARES.keys()
