import itertools
import math

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cpsr.predictor.denoise import SMALLEST_SINGULAR_VALUE, Bands, Matrix, bands
from cpsr.predictor.line import line_coefficients

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


def mid_bins(split: Bands) -> int:
    return (len(split.spectrum) + 1) // 2


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


@even_counts
def test_amplitudes_are_the_real_and_imaginary_parts(count: int) -> None:
    values = numpy.random.default_rng(count).normal(size=count)
    times = even(count)
    spectrum = numpy.fft.rfft(residual_of(values, times)) * 2 / count
    if count % 2 == 0:
        spectrum[-1] /= 2  # Nyquist: its own conjugate
        imaginary = -spectrum.imag[1:-1]
    else:
        imaginary = -spectrum.imag[1:]
    amplitudes = bands(times, 1.0).spectrum @ values
    assert len(amplitudes) == count - 1
    numpy.testing.assert_allclose(amplitudes, numpy.concatenate([spectrum.real[1:], imaginary]), atol=1e-12)


@pytest.mark.parametrize(("count", "bins"), [(2, 0), (3, 0), (4, 1), (7, 1), (8, 2), (13, 2), (14, 3), (20, 4)])
def test_the_mid_band_is_forty_percent_of_the_bins(count: int, bins: int) -> None:
    assert mid_bins(bands(even(count))) == bins


@given(irregular(), fractions, st.floats(1e-3, 1e3), st.floats(-10, 10))
def test_units_and_origin_of_time_do_not_matter(
    times: list[float], fraction: float, unit: float, origin: float
) -> None:
    split, other = bands(times, fraction), [origin + unit * time for time in times]
    span = other[-1] - other[0]
    assume(min(numpy.diff(other)) >= 1e-6 * span)
    # Rounding of the shifted times moves the checkpoints themselves, by this share of their span.
    assume(numpy.finfo(float).eps * max(map(abs, other)) < 1e-9 * span)
    moved = bands(other, fraction)
    numpy.testing.assert_allclose(moved.low, split.low, atol=1e-6)
    if conditioned(split):
        numpy.testing.assert_allclose(moved.mid, split.mid, atol=1e-5)


def conditioned(split: Bands) -> bool:
    """Whether nothing was left out for the times' sake: sinusoids at the edge of that may go either way."""
    return bool(mid_bins(split) == 0 or numpy.linalg.matrix_rank(split.spectrum, tol=1e-3) == len(split.spectrum))


@even_counts
def test_continued_at_the_checkpoints_the_bands_are_themselves(count: int) -> None:
    for times in (even(count), numpy.cumsum(numpy.random.default_rng(count).uniform(0.5, 2, count)).tolist()):
        split = bands(times, 0.7)
        rows = [split.mid_at(time) for time in times]
        numpy.testing.assert_allclose(rows, split.mid, atol=1e-12)
        numpy.testing.assert_allclose([split.baseline_at(time) for time in times], split.low, atol=1e-12)
        numpy.testing.assert_allclose(split.denoised, split.low + split.mid, atol=0)


@even_counts
def test_one_gap_later_the_mid_band_begins_again(count: int) -> None:
    split = bands(even(count))
    numpy.testing.assert_allclose(split.mid_at(3.0 + 0.05 * count), split.mid[0], atol=1e-11)


@given(irregular(), st.floats(0, 2))
def test_the_extrapolated_baseline_is_the_line(times: list[float], reach: float) -> None:
    target = times[-1] + reach * (times[-1] - times[0])
    row = bands(times).baseline_at(target)
    # The line's own formula works on times as they are: rounding relative to the span grows with their distance from 0.
    atol = 1e-12 * (1 + times[-1] / (times[-1] - times[0]))
    numpy.testing.assert_allclose(row, line_coefficients(times, target, gain=1.0, base=1.0), atol=atol)


@given(irregular(), st.floats(0, 2))
def test_clustered_times_do_not_blow_up_the_continued_band(times: list[float], reach: float) -> None:
    split = bands(times)
    row = split.mid_at(times[-1] + reach * (times[-1] - times[0]))
    assert abs(row.sum()) < 1e-10
    # The mean square of the singular values is K/2, so the largest is no smaller.
    bound = math.sqrt(2 * mid_bins(split) / len(times)) / SMALLEST_SINGULAR_VALUE
    assert numpy.linalg.norm(row) <= bound + 1e-9


def test_sinusoids_that_the_times_hardly_sample_are_left_to_the_high_band() -> None:
    # Eight checkpoints in a thousandth of the span: seen from there all sinusoids are constants.
    times = [0.0, 0.5, *(1.0 + 1e-4 * k for k in range(8))]
    split = bands(times)
    assert mid_bins(split) == 2
    assert numpy.linalg.matrix_rank(split.spectrum, tol=1e-6) < len(split.spectrum)
    assert numpy.linalg.norm(split.mid_at(1.5)) < 10


@pytest.mark.parametrize("count", [7, 8, 12, 13])
def test_a_line_with_a_symmetric_sinusoid_of_the_mid_band_is_kept_and_continued(count: int) -> None:
    times = even(count)
    period, middle = 0.05 * count, (times[0] + times[-1]) / 2
    split = bands(times)

    def truth(time: float) -> float:
        waves = (math.cos(2 * math.pi * q * (time - middle) / period) for q in range(1, mid_bins(split) + 1))
        return 2.0 - 0.3 * time + 0.5 * sum(waves)

    values = numpy.array([truth(time) for time in times])
    numpy.testing.assert_allclose(split.denoised @ values, values, atol=1e-12)
    for ahead in (0.01, 0.05, 0.2):
        row = split.baseline_at(times[-1] + ahead) + split.mid_at(times[-1] + ahead)
        assert row @ values == pytest.approx(truth(times[-1] + ahead), abs=1e-11)


@given(st.integers(7, 16), st.floats(0, 2 * math.pi), st.floats(0, 4))
def test_of_any_other_sinusoid_the_line_takes_its_slope(count: int, phase: float, gaps: float) -> None:
    """The baseline goes on along the sinusoid's own slope, where the sinusoid would have turned: no more goes wrong."""
    times = numpy.arange(count, dtype=numpy.float64)
    split = bands(times.tolist())
    target = times[-1] + gaps

    def wave(time: Matrix | float) -> Matrix:
        return numpy.asarray(numpy.sin(2 * math.pi * numpy.asarray(time) / count + phase))

    slope = numpy.polyfit(times, wave(times), 1)[0]
    ramp = times - times.mean()
    bins = mid_bins(split)
    coefficients = numpy.fft.rfft(ramp) / count
    turns = 2j * math.pi * target / count * numpy.arange(1, bins + 1)
    ramp_at_target = 2 * float(numpy.real(coefficients[1 : bins + 1] @ numpy.exp(turns)))
    expected = float(wave(target)) + slope * (target - times.mean() - ramp_at_target)
    row = split.baseline_at(target) + split.mid_at(target)
    assert row @ wave(times) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([1.0], "1 times"),
        ([0.0, 1.0, 1.0], "1 follows 1"),
        ([0.0, 2.0, 1.0], "1 follows 2"),
        ([0.0, math.nan, 1.0], "finite"),
        ([0.0, math.inf], "finite"),
    ],
)
def test_bad_times_are_errors(times: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bands(times)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_bad_fractions_are_errors(fraction: float) -> None:
    with pytest.raises(ValueError, match="mid_fraction"):
        bands([0.0, 1.0, 2.0], fraction)
