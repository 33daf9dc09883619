"""The straightness of the weights' recent path."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.gram import gram
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.predictor.straightness import path_places, reach_factor, straightness
from cpsr.predictor.vitp import VITPPredictor

MakeHistory = Callable[..., Any]
ITERATIONS = list(range(650, 1001, 50))


def points(interval: int, count: int) -> list[HistoryEntry]:
    return [HistoryEntry(place * interval, float(place), 1e-3) for place in range(1, count + 1)]


def walk(angle: float) -> list[dict[str, torch.Tensor]]:
    """Weights that go straight for half of the path, and then turn."""
    half = len(ITERATIONS) // 2
    place, path = torch.zeros(2, dtype=torch.float64), []
    for step in range(len(ITERATIONS)):
        turned = angle if step > half else 0.0
        place = place + torch.tensor([math.cos(turned), math.sin(turned)], dtype=torch.float64)
        path.append({"w": place.float(), "still": torch.ones(3)})
    return path


@pytest.mark.parametrize(
    ("interval", "count", "expected"),
    [(50, 20, (13, 16, 19)), (100, 8, (4, 5, 7)), (20, 40, (24, 31, 39)), (10, 40, (20, 29, 39)), (300, 3, (0, 1, 2))],
)
def test_the_path_is_that_of_300_iterations_in_two_halves(
    interval: int, count: int, expected: tuple[int, int, int]
) -> None:
    assert path_places(points(interval, count)) == expected


@given(st.integers(3, 60), st.integers(1, 500))
def test_both_halves_hold_a_checkpoint(count: int, interval: int) -> None:
    first, middle, last = path_places(points(interval, count))
    assert 0 <= first < middle < last == count - 1


@pytest.mark.parametrize("angle", [0.0, math.pi / 3, math.pi / 2, math.pi])
def test_it_is_the_cosine_of_the_turn(make_history: MakeHistory, angle: float) -> None:
    history = make_history(ITERATIONS, walk(angle))
    first, middle, last = path_places(history.entries)
    # Half of the path is three steps, and the turn lies in its middle.
    assert (first, middle, last) == (1, 4, 7)
    assert straightness(gram(history, "w", [first, middle, last])) == pytest.approx(math.cos(angle), abs=2e-3)


def test_what_never_moved_or_is_damaged_has_none() -> None:
    assert straightness(torch.zeros(2, 2, dtype=torch.float64)) == 0.0
    assert straightness(torch.full((2, 2), math.nan, dtype=torch.float64)) == 0.0


def test_predictors_measure_it_over_all_weights_from_what_they_learned_or_from_the_history(
    make_history: MakeHistory,
) -> None:
    history = make_history(ITERATIONS, walk(math.pi / 3))
    target = Target(1030, 1030.0, 1.0)
    learned, fresh, line = VITPPredictor(), VITPPredictor(), LinePredictor()
    for _ in learned.learn(history):
        pass
    found = [one.forecast(history, target).settings["context"]["straightness"] for one in (learned, fresh, line)]
    assert found == [pytest.approx(0.5, abs=2e-3)] * 3
    assert (learned.straightness(), fresh.straightness()) == (found[0], None)


def test_a_straight_path_promises_more(make_history: MakeHistory) -> None:
    target = Target(1030, 1030.0, 1.0)
    costs = [
        LinePredictor().forecast(make_history(ITERATIONS, walk(angle)), target).expected_end_cost_iterations
        for angle in (0.0, math.pi / 2)
    ]
    assert costs[0] < costs[1]


def path(first: float, second: float, cosine: float) -> torch.Tensor:
    between = cosine * math.sqrt(first * second)
    return torch.tensor([[first, between], [between, second]], dtype=torch.float64)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(-1.0, 1.0), st.floats(1e-3, 1.0))
def test_a_straighter_path_is_followed_further(first: float, second: float, cosine: float, whole: float) -> None:
    own = straightness(path(first, second, cosine))
    factor = reach_factor(path(first, second, cosine), whole)
    assert factor == pytest.approx(min(max(own / whole, 0.0), 2.0))
    assert reach_factor(path(first, second, whole), straightness(path(first, second, whole))) == 1.0


@pytest.mark.parametrize("whole", [0.0, -0.3])
def test_a_model_without_direction_has_one_reach(whole: float) -> None:
    assert reach_factor(path(1.0, 1.0, 0.5), whole) == 1.0


@pytest.mark.parametrize("still", [path(0.0, 1.0, 0.0), path(1.0, 0.0, 0.0), path(math.nan, 1.0, 0.5)])
def test_an_operator_whose_path_is_not_known_follows_the_model(still: torch.Tensor) -> None:
    assert reach_factor(still, 0.4) == 1.0
