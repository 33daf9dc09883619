"""The words in which plans and recoveries state what a failure costs."""

import math

import pytest

from cpsr.planner.price import exact_price, predicted_price


@pytest.mark.parametrize(("iterations", "count"), [(11, "11 iterations"), (1, "1 iteration"), (20.6, "21 iterations")])
def test_exact_is_later(iterations: float, count: str) -> None:
    assert exact_price(iterations) == f"exact: {count} later"


@pytest.mark.parametrize(
    ("cost", "deviation", "words"),
    [
        (12.4, 7.6, "12 ± 8"),
        (-12.4, 7.6, "-12 ± 8"),
        (-0.4, 0.4, "0"),
        (3.0, math.nan, "3"),
    ],
)
def test_predicted_is_on_time_for_a_signed_cost(cost: float, deviation: float, words: str) -> None:
    assert predicted_price(cost, deviation) == f"predicted state; expected cost {words} iterations"
