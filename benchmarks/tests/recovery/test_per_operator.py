from collections.abc import Callable
from typing import Any

import torch

from cpsr.benchmarks.recovery.methods.per_operator import LineByStraightness, LineOfReaders
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import StatePredictor, Target

MakeHistory = Callable[..., Any]
ITERATIONS = list(range(700, 1001, 50))
TARGET = Target(1040, 1040.0, 1.0)
WINDOW_ITERATIONS, GAIN = 300, 1.0

Moved = dict[str, torch.Tensor]


def moved(predictor: StatePredictor, history: Any) -> Moved:
    """How far each operator is predicted from the newest checkpoint."""
    forecast = predictor.forecast(history, TARGET)
    assert forecast.feasible, forecast.reason
    newest = len(history.entries) - 1
    return {
        name: values - history.read(name, newest, start, start + values.numel())
        for name, start, values in predictor.predict(history, forecast)
    }


def a_straight_and_a_bent_path(names: tuple[str, str]) -> list[dict[str, torch.Tensor]]:
    there = torch.linspace(-1.0, 1.0, 9)
    aside = there.flip(0) - there.mean()
    states = []
    for place in range(len(ITERATIONS)):
        turned = there * min(place, 3) + aside.abs() * max(place - 3, 0)
        states.append({names[0]: there * place, names[1]: turned})
    return states


def beside_the_line(
    make_history: MakeHistory, made: type[LinePredictor], names: tuple[str, str]
) -> tuple[Moved, Moved]:
    """How far the line moves operators of a straight and of a bent path, and how far the other does."""
    history = make_history(ITERATIONS, a_straight_and_a_bent_path(names))
    line, other = (moved(one(WINDOW_ITERATIONS, GAIN), history) for one in (LinePredictor, made))
    return line, other


def test_only_readers_move(make_history: MakeHistory) -> None:
    names = "blocks.0.qkv.weight", "blocks.0.project.weight"
    line, some = beside_the_line(make_history, LineOfReaders, names)
    torch.testing.assert_close(some[names[0]], line[names[0]])
    assert line[names[1]].norm() > 0.1
    assert some[names[1]].norm() < 1e-6


def test_what_moves_straight_is_followed_farther(make_history: MakeHistory) -> None:
    names = "straight", "bent"
    line, by_own = beside_the_line(make_history, LineByStraightness, names)
    factors = {name: float(by_own[name].norm() / line[name].norm()) for name in names}
    assert 1.0 < factors["straight"] <= 2.0
    assert factors["bent"] < 1.0
