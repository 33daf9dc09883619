"""The distribution of the distance between a failure and its checkpoint, against simulated failures and its bounds."""

import math
from decimal import Decimal, localcontext

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpsr.planner.horizons import Horizons
from cpsr.planner.inputs import Array

DRAWS = 50_000
# A mean of so many draws lies within as many of its standard errors but once in 15,000 times; the seed is fixed.
STANDARD_ERRORS = 4.0
# Of the threshold: what the grid may be wrong by where nearly all failures happen in stalls.
TOLERANCE = 0.01

Job = tuple[float, float, float, float, float]


def horizons(*figures: float) -> Horizons:
    rate, interval, first, stall, persist = (numpy.array([[figure]]) for figure in figures)
    return Horizons(rate, interval, first, stall, persist)


def shortfall(of: Horizons, threshold: float) -> float:
    return of.mean_shortfall(numpy.array([[threshold]])).item()


def drawn(rate: float, interval: float, first: float, stall: float, persist: float) -> Array:
    """Distances of failures, life by life until one had a durable checkpoint."""
    generator = numpy.random.default_rng(7)
    # Memoryless: the time since the newest checkpoint became durable, of a life that has one.
    since = numpy.mod(generator.exponential(1 / rate, DRAWS), interval + stall)
    left = interval - persist
    found = persist + numpy.where(since < left, since, numpy.maximum(left, since - stall))
    chained = numpy.arange(DRAWS)
    while len(chained):
        lasted = generator.exponential(1 / rate, len(chained))
        on = lasted < first + stall + persist
        chained, lasted = chained[on], lasted[on]
        found[chained] += numpy.where(lasted < first, lasted, numpy.maximum(first, lasted - stall))
    return found


def mean_distance(*job: float) -> float:
    """By integration, with so many digits that differences keep some: what lives train until a failure."""
    rate, interval, first, stall, persist = (Decimal(figure) for figure in job)

    def trained(until: Decimal, end: Decimal) -> Decimal:
        """Iterations that failures before the end have trained, times their probability."""
        stalls, resumes, ends = (-rate * until).exp(), (-rate * (until + stall)).exp(), (-rate * (end + stall)).exp()
        before = (1 - stalls) / rate - until * stalls
        after = until * resumes - end * ends + (resumes - ends) / rate
        return before + until * (stalls - resumes) + after

    with localcontext(prec=60):
        since = trained(interval - persist, interval) / (1 - (-rate * (interval + stall)).exp())
        renewed = (-rate * (first + stall + persist)).exp()
        return float(persist + since + trained(first, first + persist) / renewed)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param((1 / 1000, 20.0, 20.0, 1.0, 5.0), id="rare failures"),
        pytest.param((1 / 88, 10.0, 60.0, 0.1, 2.0), id="a watch of several intervals"),
        pytest.param((1 / 40, 28.0, 60.0, 7.0, 20.0), id="most lives are not renewed"),
        pytest.param((1 / 60, 50.0, 60.0, 30.0, 50.0), id="persisting takes the whole interval"),
        pytest.param((1 / 30, 5.0, 5.0, 10.0, 3.0), id="mostly stalls"),
        pytest.param((0.2419, 1.0, 1.0, 19.83, 0.2419), id="one life in 163 is renewed"),
        pytest.param((0.2714, 1.0, 1.0, 22.16, 0.0), id="one life in 537 is renewed"),
        pytest.param((0.0515, 1.0, 1.0, 28.91, 0.0515), id="a stall as long as 29 intervals"),
    ],
)
def test_it_is_the_mean_of_simulated_failures(job: Job) -> None:
    distances = drawn(*job)
    of = horizons(*job)
    for threshold in (5.0, 20.0, 50.0, 75.0, 100.0, 300.0, 3475.6, 5507.0):
        short = numpy.maximum(threshold - distances, 0.0)
        error = STANDARD_ERRORS * float(numpy.std(short)) / math.sqrt(DRAWS)
        assert shortfall(of, threshold) == pytest.approx(short.mean(), abs=error + 0.001 * threshold)


def test_no_failure_is_nearer_than_the_checkpoint_takes_to_be_durable() -> None:
    of = horizons(1 / 100, 20.0, 60.0, 1.0, 7.0)
    assert [shortfall(of, threshold) for threshold in (-math.inf, -5.0, 0.0, 7.0)] == [0, 0, 0, 0]
    assert shortfall(of, math.inf) == math.inf
    assert shortfall(of, 7.1) > 0


def test_what_cannot_be_computed_is_not_a_number() -> None:
    assert math.isnan(shortfall(horizons(math.nan, 20.0, 60.0, 1.0, 7.0), 50.0))
    assert math.isnan(shortfall(horizons(1 / 100, 20.0, 60.0, 1.0, 7.0), math.nan))


def test_cells_do_not_disturb_each_other() -> None:
    rates = numpy.geomspace(1e-6, 0.3, 2100).reshape(3, 700)
    same = [numpy.full_like(rates, figure) for figure in (20.0, 60.0, 3.0, 7.0)]
    together = Horizons(rates, *same).mean_shortfall(numpy.full_like(rates, 90.0))
    assert together.shape == rates.shape
    for place in ((0, 0), (1, 13), (2, 699)):
        assert together[place] == pytest.approx(
            shortfall(horizons(rates[place], 20.0, 60.0, 3.0, 7.0), 90.0), rel=1e-12
        )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    interval, watch = draw(st.integers(1, 5000)), draw(st.integers(0, 300))
    rate, stall = draw(st.floats(1e-12, 1.0)), draw(st.floats(0.0, 100.0))
    return rate, float(interval), float(max(interval, watch)), stall, draw(st.floats(0.0, 1.0)) * interval


@settings(max_examples=300)
@given(job=jobs(), threshold=st.floats(-100.0, 1e5))
@example(job=(0.2419, 1.0, 1.0, 19.83, 0.2419), threshold=5507.0)
@example(job=(0.2714, 1.0, 1.0, 22.16, 0.0), threshold=3475.6)
@example(job=(0.0515, 1.0, 1.0, 28.91, 0.0515), threshold=100.0)
def test_it_is_between_its_bounds_and_rises_with_the_threshold_by_no_more_than_that(job: Job, threshold: float) -> None:
    of, persist, tolerance = horizons(*job), job[4], TOLERANCE * max(1.0, threshold)
    near, far = (shortfall(of, one) for one in (threshold, threshold + 1))
    for one, found in ((threshold, near), (threshold + 1, far)):
        assert found <= max(one - persist, 0.0) * (1 + 1e-9)
        assert found >= 0
        if job[0] * (job[2] + job[3] + persist) < 500:  # the mean is a number
            mean = mean_distance(*job)
            assert found >= (one - mean) - 1e-6 * (mean + abs(one))
    assert -tolerance <= far - near <= 1 + tolerance


@given(job=jobs())
def test_a_threshold_beyond_all_failures_is_as_far_from_them_as_from_their_mean(job: Job) -> None:
    rate, _, first, stall, persist = job
    if rate * (first + stall + persist) > 10:  # the mean is so far that nothing lies beyond
        return
    mean = mean_distance(*job)
    threshold = 60 * (mean + first + persist)
    assert shortfall(horizons(*job), threshold) == pytest.approx(threshold - mean, rel=1e-6)
