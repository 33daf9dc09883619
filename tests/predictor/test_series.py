import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.checkpoint_series import path_places, reach_factor, straightness, too_far
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.predictor.vitp import VITPPredictor
from cpsr.predictor.weight_pieces import gram


def at(iterations: list[int], pace: float = 1.0) -> list[HistoryEntry]:
    return [HistoryEntry(i, pace * i, pace) for i in iterations]


def to(failure: int) -> Target:
    return Target(failure, float(failure), 1.0)


def test_further_than_the_span_is_too_far_for_what_extrapolates() -> None:
    assert too_far(to(1100), at([900, 950, 1000])) is None
    reason = too_far(to(1101), at([900, 950, 1000]))
    assert reason is not None
    assert "further than the 100" in reason


def test_beyond_ten_intervals_is_too_far_for_all() -> None:
    entries = at(list(range(1000, 1601, 10)))
    assert too_far(to(1700), entries) is None
    reason = too_far(to(1701), entries)
    assert reason is not None
    assert "more than 10 intervals of 10" in reason


def test_more_learning_rate_ahead_than_in_the_window_is_too_far() -> None:
    entries = at([900, 950, 1000], pace=0.1)
    assert too_far(Target(1010, 110.0, 1.0), entries) is None
    reason = too_far(Target(1010, 110.1, 1.0), entries)
    assert reason is not None
    assert "more than the 10 over the whole window" in reason


MakeHistory = Callable[..., Any]
ITERATIONS = list(range(650, 1001, 50))


def walk(angle: float) -> list[dict[str, torch.Tensor]]:
    """Weights that go straight for half of the path, and then turn."""
    half = len(ITERATIONS) // 2
    place, path = torch.zeros(2, dtype=torch.float64), []
    for step in range(len(ITERATIONS)):
        turned = angle if step > half else 0.0
        place = place + torch.tensor([math.cos(turned), math.sin(turned)], dtype=torch.float64)
        path.append({"w": place.float(), "still": torch.ones(3)})
    return path


@pytest.mark.parametrize("angle", [math.pi / 3, math.pi])
def test_it_is_the_cosine_of_the_turn(make_history: MakeHistory, angle: float) -> None:
    history = make_history(ITERATIONS, walk(angle))
    first, middle, last = path_places(history.entries)
    # Half of the path is three steps, and the turn lies in its middle.
    assert (first, middle, last) == (1, 4, 7)
    assert straightness(gram(history, "w", [first, middle, last])) == pytest.approx(math.cos(angle), abs=2e-3)


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


def path(first: float, second: float, cosine: float) -> torch.Tensor:
    between = cosine * math.sqrt(first * second)
    return torch.tensor([[first, between], [between, second]], dtype=torch.float64)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(-1.0, 1.0), st.floats(1e-3, 1.0))
def test_a_straighter_path_is_followed_further(first: float, second: float, cosine: float, whole: float) -> None:
    own = straightness(path(first, second, cosine))
    factor = reach_factor(path(first, second, cosine), whole)
    assert factor == pytest.approx(min(max(own / whole, 0.0), 2.0))
    assert reach_factor(path(first, second, whole), straightness(path(first, second, whole))) == 1.0
