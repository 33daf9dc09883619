import itertools
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.denoise import MID_FRACTION, bands


@st.composite
def irregular(draw: st.DrawFn) -> list[float]:
    """Ascending times whose gaps differ by up to nine orders of magnitude: clusters and lone ones."""
    gaps = draw(st.lists(st.tuples(st.floats(1, 10), st.integers(-9, 0)), min_size=1, max_size=15))
    return list(itertools.accumulate([draw(st.floats(0, 10)), *(value * 10.0**power for value, power in gaps)]))


@given(irregular())
def test_a_line_is_left_as_it_is_and_nothing_is_amplified(times: list[float]) -> None:
    both = numpy.add(*bands(times))
    line = (numpy.array(times) - times[0]) / (times[-1] - times[0])  # values below 1
    numpy.testing.assert_allclose(both.sum(axis=1), 1.0, atol=1e-12)
    numpy.testing.assert_allclose(both @ line, line, atol=1e-12)
    residual = numpy.eye(len(times)) - numpy.polynomial.polynomial.polyvander(line, 1) @ numpy.linalg.pinv(
        numpy.polynomial.polynomial.polyvander(line, 1)
    )
    assert numpy.linalg.norm(both @ residual, 2) <= 1.0 + 1e-9


@pytest.mark.parametrize("count", range(2, 18))
def test_on_an_even_grid_it_is_the_line_and_the_lowest_bins_of_the_fft(count: int) -> None:
    values = numpy.random.default_rng(count).normal(size=count)
    times = [3.0 + 0.05 * k for k in range(count)]
    residual = values - numpy.polyval(numpy.polyfit(times, values, 1), times)
    spectrum = numpy.fft.rfft(residual)
    assert abs(spectrum[0]) < 1e-12  # bin 0 belongs to the line
    spectrum[math.floor(MID_FRACTION * (count // 2) + 0.5) + 1 :] = 0.0
    numpy.testing.assert_allclose(
        numpy.add(*bands(times)) @ values, values - residual + numpy.fft.irfft(spectrum, count), atol=1e-12
    )
