"""The lag of a recovery, as its losses show it: evidence that the planner and the predictor weigh by its error."""

import math

import numpy
import pytest

from cpsr.life.probation import measure_lag

FAILURE = 1000


def losses(first: int, last: int, behind: int = 0, noise: float = 0.0) -> list[tuple[int, float]]:
    draw = numpy.random.default_rng(first + behind + 100)
    return [(at, 6.0 - 0.5 * math.log(at - behind) + draw.normal(0.0, noise)) for at in range(first, last + 1)]


@pytest.mark.parametrize("behind", [-80, 0, 40])
def test_a_shift_of_the_losses_is_measured_within_its_error(behind: int) -> None:
    measured = measure_lag(losses(600, FAILURE, 0, 0.02), losses(FAILURE + 60, FAILURE + 160, behind, 0.02))
    assert measured is not None
    lag, error = measured
    assert 3.0 < error < 60.0
    assert abs(lag - behind) < 2.5 * error


def test_nothing_is_measured_from_too_little() -> None:
    before, after = losses(600, FAILURE), losses(FAILURE + 60, FAILURE + 160)
    assert measure_lag(before, after) is not None
    assert measure_lag(before[:99], after) is None
    assert measure_lag(before, after[:9]) is None
    assert measure_lag(before, [(at, math.nan) for at, _ in after]) is None
    assert measure_lag([(at, 2.0) for at, _ in before], after) is None  # flat
    assert measure_lag([], after) is None
