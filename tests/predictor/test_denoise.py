import itertools
import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.denoise import Matrix, bands

even_counts = pytest.mark.parametrize("count", range(2, 18))
fractions = st.floats(0, 1)


@st.composite
def irregular(draw: st.DrawFn) -> list[float]:
    """Ascending times whose gaps differ by up to nine orders of magnitude: clusters and lone ones."""
    gaps = draw(st.lists(st.tuples(st.floats(1, 10), st.integers(-9, 0)), min_size=1, max_size=15))
    return list(itertools.accumulate([draw(st.floats(0, 10)), *(value * 10.0**power for value, power in gaps)]))


def even(count: int, gap: float = 0.05, first: float = 3.0) -> list[float]:
    return [first + gap * k for k in range(count)]


def residual_of(values: Matrix, times: list[float]) -> Matrix:
    return numpy.asarray(values - numpy.polyval(numpy.polyfit(times, values, 1), times))


@given(irregular(), fractions)
def test_the_bands_are_the_identity(times: list[float], fraction: float) -> None:
    split = bands(times, fraction)
    numpy.testing.assert_allclose(split.low + split.mid + split.high, numpy.eye(len(times)), atol=1e-14)
    numpy.testing.assert_allclose(split.low.sum(axis=1), 1.0, atol=1e-12)
    for band in (split.mid, split.high):
        numpy.testing.assert_allclose(band.sum(axis=1), 0.0, atol=1e-12)
        # A line has nothing in them. Its values here are below 1.
        line = (numpy.array(times) - times[0]) / (times[-1] - times[0])
        numpy.testing.assert_allclose(band @ line, 0.0, atol=1e-12)


@given(irregular(), fractions)
def test_no_band_amplifies(times: list[float], fraction: float) -> None:
    split = bands(times, fraction)
    for band in (split.low, split.mid, split.high):
        assert numpy.linalg.norm(band, 2) <= 1.0 + 1e-12
    numpy.testing.assert_allclose(split.low @ split.low, split.low, atol=1e-12)


@even_counts
@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.4, 0.7, 1.0])
def test_on_an_even_grid_the_split_is_the_fft_of_the_residual(count: int, fraction: float) -> None:
    values = numpy.random.default_rng(count).normal(size=count)
    times = even(count)
    split = bands(times, fraction)
    residual = residual_of(values, times)
    spectrum = numpy.fft.rfft(residual)
    assert abs(spectrum[0]) < 1e-12  # bin 0 belongs to the line
    bins = math.floor(fraction * (count // 2) + 0.5)
    kept, dropped = numpy.zeros_like(spectrum), numpy.zeros_like(spectrum)
    kept[1 : bins + 1], dropped[bins + 1 :] = spectrum[1 : bins + 1], spectrum[bins + 1 :]
    numpy.testing.assert_allclose(split.low @ values, values - residual, atol=1e-12)
    numpy.testing.assert_allclose(split.mid @ values, numpy.fft.irfft(kept, count), atol=1e-12)
    numpy.testing.assert_allclose(split.high @ values, numpy.fft.irfft(dropped, count), atol=1e-12)
