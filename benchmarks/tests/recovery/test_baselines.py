import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.recovery.methods.baselines import BASELINES, LineValue, PlainLine
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import Forecast, HistoryEntry, Target

MakeHistory = Callable[..., Any]
ITERATIONS = list(range(700, 1001, 50))
LINES = [name for name in BASELINES if name.startswith("line-w")]

hypothesis_settings = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def predict(method: str, history: Any, target: Target) -> torch.Tensor:
    predictor = BASELINES[method]()
    forecast = predictor.forecast(history, target)
    assert forecast.feasible, forecast.reason
    return torch.cat([values for _, _, values in predictor.predict(history, forecast)])


def on_a_line(times: list[float]) -> list[dict[str, torch.Tensor]]:
    slope = torch.linspace(-1, 1, 9, dtype=torch.float64)
    return [{"w": (0.5 + slope * time).float()} for time in times]


@pytest.mark.parametrize("method", [*LINES, "secant", "fdd"])
@hypothesis_settings
@given(
    gaps=st.lists(st.integers(20, 45), min_size=10, max_size=14),
    rates=st.lists(st.floats(1e-4, 1e-3), min_size=14, max_size=14),
    horizon=st.integers(1, 20),
)
def test_weights_on_a_line_in_time_are_predicted_exactly(
    make_history: MakeHistory, method: str, gaps: list[int], rates: list[float], horizon: int
) -> None:
    iterations, times = [2000], [1.0]
    for gap, rate in zip(gaps, rates, strict=False):
        iterations.append(iterations[-1] + gap)
        times.append(times[-1] + gap * rate)
    # As fast as the last gap: nothing that extrapolates may go further ahead than it looks back.
    target = Target(iterations[-1] + horizon, times[-1] + horizon * rates[len(gaps) - 1], 1e-3)
    out = predict(method, make_history(iterations, on_a_line(times), times=times), target)
    # Weights below 3 are rounded to 1.2e-7 each; coefficients of these methods add up to below 8 in size here.
    torch.testing.assert_close(out, on_a_line([target.time])[0]["w"], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("method", ["fdd"])
@pytest.mark.parametrize("horizon", [7, 30, 50])
def test_a_line_with_a_symmetric_wave_of_the_mid_band_is_continued(
    make_history: MakeHistory, method: str, horizon: int
) -> None:
    def truth(iteration: float) -> torch.Tensor:
        wave = math.cos(2 * math.pi * (iteration - 850) / 350)  # 7 checkpoints 50 apart: the period of bin 1
        amplitude = torch.linspace(-0.2, 0.2, 9, dtype=torch.float64)
        return (1.0 + 1e-3 * iteration + amplitude * wave).float()

    history = make_history(ITERATIONS, [{"w": truth(iteration)} for iteration in ITERATIONS])
    out = predict(method, history, Target(1000 + horizon, 1000.0 + horizon, 1.0))
    torch.testing.assert_close(out, truth(1000 + horizon), rtol=0.0, atol=1e-6)  # weights of 2, rounded to 2.4e-7
    line = predict("line-w300", history, Target(1000 + horizon, 1000.0 + horizon, 1.0))
    assert (line - truth(1000 + horizon)).abs().max() > 0.01  # where the line alone is wrong


def test_the_simple_ones_are_what_they_are_called(make_history: MakeHistory) -> None:
    weights = [{"w": torch.randn(5)} for _ in ITERATIONS]
    history = make_history(ITERATIONS, weights)
    target = Target(1030, 1030.0, 1.0)
    last = [step["w"] for step in weights[-3:]]
    torch.testing.assert_close(predict("stale", history, target), last[2], rtol=0, atol=0)
    torch.testing.assert_close(predict("secant", history, target), last[2] + 0.6 * (last[2] - last[1]))
    torch.testing.assert_close(predict("mean-3", history, target), sum(last, torch.zeros(5)) / 3)


@pytest.mark.parametrize(
    ("method", "line", "window", "gain"),
    [
        ("line-w100", LineValue, 100, 1.0),
        ("line-w200", LineValue, 200, 1.0),
        ("line-w300", LineValue, 300, 1.0),
        ("line-w400", LineValue, 400, 1.0),
        ("line-x2", PlainLine, 300, 2.0),
        ("line-1.5", LineValue, 300, 1.5),
        ("line-one-reach", PlainLine, None, None),
        ("line", LinePredictor, None, None),
    ],
)
def test_the_lines_are_lines_of_these_settings(
    make_history: MakeHistory, method: str, line: type[LinePredictor], window: Any, gain: Any
) -> None:
    iterations = list(range(400, 1001, 50))
    history = make_history(iterations, [{"w": torch.randn(5)} for _ in iterations])
    target = Target(1030, 1030.0, 1.0)
    expected = line(window, gain).forecast(history, target)
    assert BASELINES[method]().forecast(history, target).coefficients == expected.coefficients
    if window is not None:
        assert expected.settings["used_iterations"][0] == 1000 - window


def refused(method: str, make_history: MakeHistory, iterations: list[int], failure: int) -> Forecast:
    history = make_history(iterations, on_a_line([float(i) for i in iterations]))
    return BASELINES[method]().forecast(history, Target(failure, float(failure), 1.0))


@pytest.mark.parametrize(
    ("method", "needed"),
    [("stale", 1), ("secant", 2), *((name, 3) for name in BASELINES if name not in ("stale", "secant"))],
)
def test_each_needs_so_many_checkpoints(make_history: MakeHistory, method: str, needed: int) -> None:
    for count in range(1, 4):
        forecast = refused(method, make_history, ITERATIONS[-count:], 1010)
        assert forecast.feasible is (count >= needed)
        if count < needed:
            assert ("there is one" if count == 1 else "there are 2") in forecast.reason


@pytest.mark.parametrize(("method", "furthest"), [("secant", 1050), ("line-w100", 1100), ("mean-3", 1500)])
def test_each_reaches_so_far(make_history: MakeHistory, method: str, furthest: int) -> None:
    assert refused(method, make_history, ITERATIONS, furthest).feasible
    assert not refused(method, make_history, ITERATIONS, furthest + 1).feasible


def test_a_short_window_at_a_long_interval_says_so(make_history: MakeHistory) -> None:
    forecast = refused("line-w100", make_history, list(range(500, 1001, 100)), 1030)
    assert not forecast.feasible
    assert "3 usable checkpoints within 100 iterations, and there are 2" in forecast.reason


@pytest.mark.parametrize("method", ["stale", "secant", "mean-3", "ridge-ar", "fdd"])
def test_nothing_is_promised_where_nothing_was_measured(make_history: MakeHistory, method: str) -> None:
    assert refused(method, make_history, ITERATIONS, 1030).expected_end_cost_iterations == 30.0


def test_fdd_drops_what_alternates(make_history: MakeHistory) -> None:
    """The highest frequency is noise to it, and damped to under half; the secant doubles it."""
    entries = [HistoryEntry(i, float(i), 1.0) for i in ITERATIONS]
    weights = [{"w": torch.tensor([(-1.0) ** place])} for place in range(len(entries))]
    history = type(make_history([1], [{}]))(entries, weights)
    target = Target(1030, 1030.0, 1.0)
    assert abs(predict("fdd", history, target).item()) < 0.5
    assert abs(predict("secant", history, target).item()) > 2.0
