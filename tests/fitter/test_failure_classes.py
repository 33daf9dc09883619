import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.fitter.failure_classes import PRIOR_SHARES, FailureClasses
from cpsr.fitter.failure_rate import FailureRate
from cpsr.journal import FailureScope

HOUR = 3600.0


def classes(seen: dict[FailureScope, int], unknown: int = 0, hours: float = 0.0, weight: float = 1.0) -> FailureClasses:
    return FailureClasses(FailureRate(12.0, weight, sum(seen.values()) + unknown, hours * HOUR), seen)


def test_before_any_failure_the_shares_are_those_of_the_prior() -> None:
    assert sum(PRIOR_SHARES.values()) == pytest.approx(1.0)
    for scope, share in PRIOR_SHARES.items():
        assert classes({}).share(scope) == share
        assert classes({}, hours=100.0).rate(scope).mean_per_second == pytest.approx(share / (112 * HOUR))


def test_a_failure_raises_the_rate_of_its_class_alone() -> None:
    before, after = classes({}, hours=10.0), classes({"process": 1}, hours=10.0)
    assert after.rate("process").mean_per_second > before.rate("process").mean_per_second
    assert after.rate("machine").mean_per_second == pytest.approx(before.rate("machine").mean_per_second)


def test_many_failures_outweigh_the_prior() -> None:
    seen = classes({"process": 90, "everything": 10}, hours=1200.0)
    assert seen.share("process") == pytest.approx(0.9, abs=0.01)
    assert seen.rate("everything").mtbf_hours == pytest.approx(120.0, rel=0.02)


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
    assert sum(found.rate(scope).mean_per_second for scope in PRIOR_SHARES) == pytest.approx(
        found.total.mean_per_second
    )
    for scope in PRIOR_SHARES:
        assert found.rate(scope).mean_per_second == pytest.approx(found.total.mean_per_second * found.share(scope))
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["classes"].keys() == PRIOR_SHARES.keys()
