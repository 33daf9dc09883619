"""The worth of an iteration, and costs counted in it."""

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.recovery.end_cost import Ending, WorthUnknownError, end_cost_iterations, iteration_worth

ITERATIONS = 1200
LENGTHS = (960, 1080, 1200, 1320, 1440)


def endings(worth: float, noise: float, seeds: int = 3) -> list[Ending]:
    """Final losses of a family that gains `worth` nats an iteration at 1200, each seed at its own level."""
    draw = numpy.random.default_rng(0)
    return [
        Ending(
            seed, length, 2.0 + 0.1 * seed - worth * ITERATIONS * math.log(length / ITERATIONS) + noise * draw.normal()
        )
        for seed in range(seeds)
        for length in LENGTHS
    ]


@given(st.floats(1e-5, 1e-2))
def test_without_noise_the_worth_is_exact(worth: float) -> None:
    found = iteration_worth(endings(worth, 0.0), ITERATIONS)
    assert found.nats == pytest.approx(worth)
    assert found.standard_error_nats < 1e-3 * worth


def test_the_error_covers_the_noise_of_trainings() -> None:
    found = iteration_worth(endings(3e-4, 0.005), ITERATIONS)
    assert abs(found.nats - 3e-4) < 3 * found.standard_error_nats
    assert found.standard_error_nats < 3e-5


def test_a_loss_that_does_not_fall_with_the_length_has_no_worth() -> None:
    for worth in (0.0, -3e-4, 1e-6):
        with pytest.raises(WorthUnknownError, match="train more seeds"):
            iteration_worth(endings(worth, 0.005), ITERATIONS)


def test_too_little_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 trainings in 1 groups"):
        iteration_worth(endings(3e-4, 0.0)[:2], ITERATIONS)
    same = [Ending(0, 1200, loss) for loss in (2.0, 2.1, 2.2)]
    with pytest.raises(ValueError, match="one length"):
        iteration_worth(same, ITERATIONS)


def test_a_cost_counts_the_gap_and_the_repeated_iterations() -> None:
    worth = iteration_worth(endings(3e-4, 0.0), ITERATIONS)
    assert end_cost_iterations(0.0, worth, 40) == 40
    assert end_cost_iterations(0.003, worth) == pytest.approx(10.0)
    assert end_cost_iterations(-0.003, worth, 40) == pytest.approx(30.0)
