import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import HuberRegressor

from cpsr.fitter.families import Exponential, Family, PowerLaw, StretchedExponential

FIRST, LENGTH = 40, 800
PLACES = numpy.arange(FIRST, FIRST + LENGTH + 1, 10, dtype=numpy.float64)


@st.composite
def curves(draw: st.DrawFn) -> tuple[Family, list[float]]:
    """A family with coefficients as training has them."""

    def between(low: float, high: float) -> float:
        return draw(st.floats(low, high))

    scale, offset = between(-3.0, 3.0), between(0.0, 3.0)
    choices: list[tuple[Family, list[float]]] = [
        (Exponential(), [between(-1e-3, 1e-3), between(-1.0, 1.5)]),
        (PowerLaw(FIRST, LENGTH), [scale, between(20.0, 500.0), between(0.1, 2.0), offset]),
        (StretchedExponential(FIRST, LENGTH), [scale, between(30.0, 3000.0), between(0.3, 1.8), offset]),
    ]
    return draw(st.sampled_from(choices))


@given(curves())
@settings(max_examples=50)
def test_derivatives_are_those_of_the_curve(curve: tuple[Family, list[float]]) -> None:
    family, values = curve
    coefficients, inner = numpy.array(values), PLACES[1:]
    jacobian = family.jacobian(inner, coefficients)
    rounding = 1e-9 * numpy.abs(family.value(inner, coefficients)).max()
    for column, value in enumerate(coefficients):
        step = numpy.zeros_like(coefficients)
        step[column] = 1e-5 * max(abs(value), 1e-2)
        rise = family.value(inner, coefficients + step) - family.value(inner, coefficients - step)
        assert jacobian[:, column] == pytest.approx(
            rise / (2 * step[column]), rel=1e-4, abs=1e-5 + rounding / step[column]
        )
    for place in inner[::20]:
        ends = family.value(numpy.array([place - 0.01, place + 0.01]), coefficients)
        assert family.slope(place, coefficients) == pytest.approx((ends[1] - ends[0]) / 0.02, rel=1e-3, abs=1e-9)


@given(curves())
# Steep at the beginning and flat for long: the median of the deviations says nothing about the steep part.
@example((StretchedExponential(FIRST, LENGTH), [1.0, 50.0, 1.75, 0.0]))
@example((PowerLaw(FIRST, LENGTH), [0.831, 20.329, 1.904, 1.042]))
@settings(max_examples=60, deadline=None)
def test_a_curve_without_noise_is_found_again(curve: tuple[Family, list[float]]) -> None:
    family, values = curve
    losses = family.value(PLACES, numpy.array(values)) + (0.0 if isinstance(family, Exponential) else 4.0)
    found, covariance = family.fit(PLACES, losses, numpy.ones_like(PLACES))
    # The curve, not the coefficients: quite different ones can draw nearly the same curve. To 2% of its range, or where
    # it hardly moves to 1e-4 nats, a hundredth of what any loss scatters by.
    assert numpy.abs(family.value(PLACES, found) - losses).max() < max(0.02 * numpy.ptp(losses), 1e-4)
    assert numpy.all(numpy.isfinite(covariance))


def test_the_covariance_of_the_exponential_is_the_spread_over_repetitions() -> None:
    family, truth = Exponential(), numpy.array([4e-4, 1.0])
    found, claimed = [], []
    for seed in range(200):
        noise = 0.1 * numpy.random.default_rng(seed).standard_t(5, size=PLACES.size)
        coefficients, covariance = family.fit(PLACES, family.value(PLACES, truth) * numpy.exp(noise), PLACES)
        found.append(coefficients)
        claimed.append(numpy.sqrt(numpy.diag(covariance)))
    spread = numpy.std(found, axis=0)
    assert numpy.median(claimed, axis=0) == pytest.approx(spread, rel=0.2)
    assert numpy.mean(found, axis=0) == pytest.approx(truth, abs=4 * spread.max() / numpy.sqrt(200))


def test_noise_that_lingers_widens_the_covariance() -> None:
    family, steps = Exponential(), numpy.random.default_rng(3).normal(size=PLACES.size)
    lingering = numpy.zeros_like(steps)
    for place in range(1, len(steps)):
        lingering[place] = 0.8 * lingering[place - 1] + 0.6 * steps[place]
    once, long = (
        family.fit(PLACES, numpy.exp(1 + 0.05 * noise), numpy.ones_like(PLACES))[1] for noise in (steps, lingering)
    )
    # (1 + 0.8) / (1 - 0.8) = 9 times the variance, as far as 81 points can show
    assert 3 < long[0, 0] / once[0, 0] < 15


@pytest.mark.parametrize("family", [PowerLaw(FIRST, LENGTH), StretchedExponential(FIRST, LENGTH)])
def test_before_its_first_iteration_a_curve_keeps_its_value(family: Family) -> None:
    coefficients = numpy.array([2.0, 100.0, 0.7, 1.0])
    early, first = family.value(numpy.array([0.0, FIRST]), coefficients)
    assert early == first


@given(seed=st.integers(0, 10**6), noise=st.floats(1e-3, 0.5), spikes=st.integers(0, 12), decades=st.floats(0.0, 3.0))
@settings(max_examples=60, deadline=None)
def test_huber_s_line_is_that_of_scikit_learn(seed: int, noise: float, spikes: int, decades: float) -> None:
    random = numpy.random.default_rng(seed)
    places = (PLACES - PLACES.mean()) / (numpy.ptp(PLACES) / 2)
    logarithms = 0.7 - 0.4 * places + noise * random.standard_normal(len(places))
    logarithms[random.choice(len(places), spikes, replace=False)] += 20 * noise
    weights = 10.0 ** (decades * places / 2)
    found, _ = Exponential().fit(PLACES, numpy.exp(logarithms), weights)
    reference = HuberRegressor(alpha=0.0, max_iter=10_000, tol=1e-9)
    reference.fit(places[:, None], logarithms, sample_weight=weights / weights.mean())
    line = logarithms - (found[1] - found[0] * PLACES), logarithms - reference.predict(places[:, None])
    assert numpy.abs(line[0] - line[1]).max() < 1e-3 * noise
