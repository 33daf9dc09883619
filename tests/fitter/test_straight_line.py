import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cpsr.fitter.straight_line import StraightLine


@given(seed=st.integers(0, 10**6), points=st.integers(3, 200), level=st.floats(-1e3, 1e3), noise=st.floats(1e-3, 10.0))
@settings(max_examples=60, deadline=None)
def test_is_the_line_of_least_squares(seed: int, points: int, level: float, noise: float) -> None:
    random = numpy.random.default_rng(seed)
    places = 1e4 + numpy.cumsum(random.uniform(0.5, 2.0, points))
    values = level - 0.3 * places + noise * random.standard_normal(points)
    line, reference = StraightLine.through(places, values), stats.linregress(places, values)
    assert line.slope == pytest.approx(reference.slope, rel=1e-9)
    assert line.intercept == pytest.approx(reference.intercept, rel=1e-9, abs=1e-6)
    assert line.slope_error == pytest.approx(reference.stderr, rel=1e-5)


def test_points_on_a_line_leave_no_error() -> None:
    line = StraightLine.through(numpy.arange(10.0), 3.0 - 2.0 * numpy.arange(10.0))
    assert (line.slope, line.intercept, line.slope_error) == (-2.0, 3.0, 0.0)
