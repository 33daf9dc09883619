import math

import numpy
import pytest

from cpsr.life.outcome import RecoveredLag, measure_unpaired
from cpsr.state.losses import Step

FAILURE = 1000


def loss(iteration: float) -> float:
    return 6.0 - 0.5 * math.log(iteration)


def step(iteration: int, value: float | None) -> Step:
    return Step(iteration, 1e-3, 0.1, True, value)


@pytest.mark.parametrize("behind", [-80, 0, 40])
def test_a_shift_of_the_losses_is_measured_within_its_error(behind: int) -> None:
    draw = numpy.random.default_rng(behind + 100)
    before = [(at, loss(at) + draw.normal(0.0, 0.02)) for at in range(600, FAILURE + 1)]
    recovered = RecoveredLag(before, FAILURE)
    for at in range(FAILURE + 1, recovered.due_iteration):
        recovered.on_steps([step(at, loss(at - behind) + draw.normal(0.0, 0.02))])
    measured = recovered.measure()
    assert measured is not None
    lag, error = measured
    assert 3.0 < error < 60.0
    assert abs(lag - behind) < 2.5 * error


def test_the_transient_and_losses_that_were_not_seen_do_not_count() -> None:
    before = [(at, loss(at)) for at in range(600, FAILURE + 1)]
    recovered = RecoveredLag(before, FAILURE)
    recovered.on_steps([step(FAILURE + 10, 50.0), step(FAILURE + 200, 50.0), step(FAILURE + 70, None)])
    recovered.on_steps([step(at, loss(at)) for at in range(FAILURE + 60, FAILURE + 161)])
    measured = recovered.measure()
    assert measured is not None
    assert measured[0] == pytest.approx(0.0, abs=1.0)


def test_nothing_is_measured_from_too_little() -> None:
    before = [(at, loss(at)) for at in range(600, FAILURE + 1)]
    after = [(at, loss(at)) for at in range(FAILURE + 60, FAILURE + 161)]
    assert measure_unpaired(before, after) is not None
    assert measure_unpaired(before[:99], after) is None
    assert measure_unpaired(before, after[:9]) is None
    assert measure_unpaired(before, [(at, math.nan) for at, _ in after]) is None
    assert measure_unpaired([(at, 2.0) for at, _ in before], after) is None  # flat
    assert RecoveredLag([], FAILURE).measure() is None
