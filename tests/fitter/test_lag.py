import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpsr.fitter.curve import LossCurve
from cpsr.fitter.lag import LagBeyondError, paired_lag, transient

FAILURE = 1000
CHUNKS = 16
EVERY = 10


def level(time: NDArray[numpy.float64]) -> NDArray[numpy.float64]:
    return numpy.asarray(1.5 + 2.5 * numpy.exp(-time / 600))


def curve(
    first: int,
    last: int,
    lag: float = 0.0,
    noise: NDArray[numpy.float64] | None = None,
    pace: NDArray[numpy.float64] | None = None,
) -> LossCurve:
    """Losses of a run that is `lag` behind, per chunk with its own offset and its own lag (`pace`, iterations)."""
    iterations = numpy.arange(first, last + 1, EVERY)
    own = numpy.zeros(CHUNKS) if pace is None else pace
    offsets = numpy.linspace(-0.3, 0.3, CHUNKS)
    losses = level(iterations[:, None] - lag - own[None, :]) + offsets
    return LossCurve(iterations, losses if noise is None else losses + noise)


def noise_like(seed: int, points: int, sigma: float) -> NDArray[numpy.float64]:
    return numpy.random.default_rng(seed).normal(0, sigma, (points, CHUNKS))


@settings(max_examples=40, deadline=None)
@given(st.floats(-150, 150))
def test_a_shift_is_found(shift: float) -> None:
    found = paired_lag(curve(FAILURE, FAILURE + 160, shift), curve(0, 2000), FAILURE)
    assert found.iterations == pytest.approx(shift, abs=0.3)
    assert found.standard_error == pytest.approx(0.0, abs=0.1)
    assert numpy.sign(found.gap_nats) == numpy.sign(shift) or abs(shift) < 1e-6
    assert found.points == 11


@pytest.mark.parametrize("shift", [-8.0, 0.0, 12.0, 42.0])
def test_noise_is_averaged_out(shift: float) -> None:
    errors = []
    for seed in range(20):
        recovered = curve(FAILURE, FAILURE + 160, shift, noise_like(seed, 17, 0.02))
        faultfree = curve(0, 2000, 0.0, noise_like(seed + 100, 201, 0.02))
        errors.append(paired_lag(recovered, faultfree, FAILURE).iterations - shift)
    # Slope 7e-4 a step; 0.02 nats over 11 x 16 values is 0.0015 nats, 2 to 3 iterations with the spline's own share.
    assert abs(numpy.mean(errors)) < 2.0
    assert numpy.std(errors) < 4.0


def test_the_standard_error_covers_the_choice_of_chunks() -> None:
    # Chunks lag by 10 +- 8 iterations each: over many drawn sets the interval holds the true 10 as often as it says.
    rng = numpy.random.default_rng(1)
    inside = 0
    for _ in range(150):
        recovered = curve(FAILURE, FAILURE + 160, 10.0, pace=rng.normal(0, 8, CHUNKS))
        found = paired_lag(recovered, curve(0, 2000), FAILURE)
        inside += abs(found.iterations - 10.0) <= 2 * found.standard_error
    assert 0.87 <= inside / 150 <= 0.99  # 2 standard errors with 15 degrees of freedom: 0.936


def test_a_flat_curve_is_refused() -> None:
    iterations = numpy.arange(0, 2001, EVERY)
    for wobble in (0.0, 0.001):
        losses = 2.0 + wobble * numpy.random.default_rng(0).normal(size=(201, CHUNKS))
        whole = LossCurve(iterations, losses)
        with pytest.raises(ValueError, match="flat from iteration 1060"):
            paired_lag(whole, whole, FAILURE)


def test_missing_points_are_named() -> None:
    good = curve(0, 2000)
    with pytest.raises(ValueError, match="has 0 points 60 to 160 iterations after 1000"):
        paired_lag(curve(FAILURE, FAILURE + 50), good, FAILURE)
    with pytest.raises(ValueError, match="covers 60 to 120 of the window"):
        paired_lag(curve(FAILURE, FAILURE + 120), good, FAILURE)
    with pytest.raises(ValueError, match="no point at iteration 1110"):
        paired_lag(curve(FAILURE, FAILURE + 160), curve(0, 1100), FAILURE)
    with pytest.raises(ValueError, match="validation chunks"):
        paired_lag(LossCurve(good.iterations, good.losses[:, :3]), good, FAILURE)
    with pytest.raises(ValueError, match="must ascend"):
        paired_lag(good, good, FAILURE, window=(160, 60))


def test_a_lag_beyond_the_data_is_refused_and_says_how_far_it_is_at_least() -> None:
    with pytest.raises(LagBeyondError, match="at the edge") as ahead:
        paired_lag(curve(FAILURE, FAILURE + 160, -40.0), curve(0, 1170), FAILURE)
    assert ahead.value.bound_iterations == -10.0  # the window ends at 1160, the fault-free curve at 1170
    with pytest.raises(LagBeyondError, match="at the edge") as behind:
        paired_lag(curve(FAILURE, FAILURE + 160, 90.0), curve(0, 2000), FAILURE, max_lag_iterations=60)
    assert behind.value.bound_iterations == 60.0


def test_transient_of_a_recovery_that_closes_the_gap() -> None:
    faultfree = curve(0, 2000)
    losses = faultfree.at(numpy.arange(FAILURE, FAILURE + 161, EVERY))
    since = numpy.arange(17)[:, None] * EVERY
    recovered = LossCurve(numpy.arange(FAILURE, FAILURE + 161, EVERY), losses + 0.08 * numpy.exp(-since / 12))
    found = transient(recovered, faultfree, FAILURE)
    assert found.gap_nats == pytest.approx(0.08)
    assert found.gap_standard_error == pytest.approx(0.0, abs=1e-9)
    assert found.iterations == 30  # 0.08 exp(-30/12) = 0.0066 is the first below 0.01


def test_a_lag_keeps_the_gap_open_and_a_lead_has_none() -> None:
    assert transient(curve(FAILURE, FAILURE + 160, 40.0), curve(0, 2000), FAILURE).iterations is None
    assert transient(curve(FAILURE, FAILURE + 160, -10.0), curve(0, 2000), FAILURE).iterations == 0
