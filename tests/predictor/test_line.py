import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpsr.predictor.line import LinePredictor, line_coefficients
from cpsr.predictor.protocol import Forecast, History, Target

MakeHistory = Callable[..., Any]
ITERATIONS = list(range(700, 1001, 50))


def predicted(predictor: LinePredictor, history: History, forecast: Forecast) -> dict[str, torch.Tensor]:
    out = {operator: torch.full((history.numel(operator),), math.nan) for operator in history.operators}
    for operator, start, values in predictor.predict(history, forecast):
        assert values.dtype == torch.float32
        out[operator][start : start + values.numel()] = values
    return out


def straight(iterations: list[int], size: int = 7) -> list[dict[str, torch.Tensor]]:
    slope = torch.linspace(-1, 1, size)
    return [{"w": 0.5 + slope * (i / 1000), "still": torch.full((3,), 0.1)} for i in iterations]


@pytest.mark.parametrize("gain", [0.0, 1.0, 1.5, 2.0])
def test_weights_on_a_line_move_along_it(make_history: MakeHistory, gain: float) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    predictor = LinePredictor(window_iterations=300, gain=gain)
    out = predicted(predictor, history, predictor.forecast(history, Target(1030, 1030.0, 1.0)))
    expected = 0.5 + torch.linspace(-1, 1, 7) * ((1000 + gain * 30) / 1000)
    torch.testing.assert_close(out["w"], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out["still"], torch.full((3,), 0.1))


def test_the_row_is_the_least_squares_fit() -> None:
    rng = numpy.random.default_rng(3)
    times, values = numpy.sort(rng.uniform(0, 1, 9)), rng.normal(size=9)
    slope, _ = numpy.polyfit(times, values, 1)
    row = line_coefficients(times.tolist(), 1.7)
    assert numpy.dot(row, values) == pytest.approx(values[-1] + 1.7 * slope)


@given(
    st.lists(st.floats(0, 10), min_size=3, max_size=12, unique=True).filter(lambda t: max(t) - min(t) > 1e-3),
    st.floats(0, 2),
)
def test_rows_sum_to_one_and_keep_the_newest(times: list[float], reach: float) -> None:
    times = sorted(times)
    row = line_coefficients(times, reach * (times[-1] - times[0]))
    assert math.fsum(row) == pytest.approx(1.0, abs=1e-12)
    assert row[-1] > 0


def test_precision_is_kept_for_small_steps_on_large_weights(make_history: MakeHistory) -> None:
    # Summing coefficient times weight in float32 would be off by about 1e-4 here; the last place is 6.1e-5.
    generator = torch.Generator().manual_seed(0)
    start = 1000 + torch.rand(512, generator=generator, dtype=torch.float64)
    weights = [
        {"w": (start + 1e-3 * torch.randn(512, generator=generator, dtype=torch.float64)).float()} for _ in ITERATIONS
    ]
    history = make_history(ITERATIONS, weights)
    predictor = LinePredictor(window_iterations=300, gain=2.0)
    forecast = predictor.forecast(history, Target(1100, 1100.0, 1.0))
    exact = sum(c * w["w"].double() for c, w in zip(forecast.coefficients["w"], weights, strict=True))
    assert isinstance(exact, torch.Tensor)
    assert (predicted(predictor, history, forecast)["w"].double() - exact).abs().max() < 3.1e-5


def test_an_operator_of_a_straighter_path_is_followed_further(make_history: MakeHistory) -> None:
    there = torch.linspace(-1.0, 1.0, 9)
    aside = (there.flip(0) - there.mean()).abs()
    turn = len(ITERATIONS) // 2
    weights = [
        {"straight": there * place, "bent": there * min(place, turn) + aside * max(place - turn, 0)}
        for place in range(len(ITERATIONS))
    ]
    history = make_history(ITERATIONS, weights)
    forecast = LinePredictor(300, 1.0).forecast(history, Target(1040, 1040.0, 1.0))
    plain = numpy.array(line_coefficients([float(i) for i in ITERATIONS], 40.0))[:-1]
    factors = {name: row[0] / plain[0] for name, row in forecast.coefficients.items()}
    for name, row in forecast.coefficients.items():
        assert row[:-1] == pytest.approx(factors[name] * plain)
    assert factors["bent"] < 1.0 < factors["straight"] <= 2.0
    lowest, _, highest = forecast.settings["operator_factors"]
    assert (lowest, highest) == pytest.approx((factors["bent"], factors["straight"]))
    assert f"({lowest:.1f} to {highest:.1f} times that by operator)" in forecast.reason
