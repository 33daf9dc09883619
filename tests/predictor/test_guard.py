import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cpsr.predictor.guard import Displacements, Guard, attempts, measure
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import Forecast, Target


def norms(predicted: float, path: list[float]) -> Displacements:
    return Displacements(
        ("w",),
        torch.tensor([predicted**2], dtype=torch.float64),
        torch.tensor([[step**2 for step in path]], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
    )


@pytest.mark.parametrize(("predicted", "scale"), [(0.0, 1.0), (2.9, 1.0), (3.0, 1.0), (6.0, 0.5), (300.0, 0.01)])
def test_the_limit_is_the_path_of_the_history(predicted: float, scale: float) -> None:
    moved = norms(predicted, [1.0, 0.5, 1.5])
    assert Guard().limit(moved).item() == pytest.approx(scale)


@pytest.mark.parametrize(("predicted", "accepted"), [(1.9, True), (2.29, True), (2.31, False), (50.0, False)])
def test_veto(predicted: float, accepted: bool) -> None:
    decision = Guard().veto(2.0, predicted)
    assert decision.accepted is accepted
    assert decision.numbers["excess_nats"] == pytest.approx(predicted - 2.0)
    assert f"{predicted:.4f}" in decision.reason
    assert Guard(loss_tolerance_nats=100.0).veto(2.0, predicted).accepted


@pytest.mark.parametrize(("checkpoint", "predicted"), [(2.0, math.nan), (2.0, math.inf), (math.nan, 2.0)])
def test_losses_that_are_not_finite_are_a_veto(checkpoint: float, predicted: float) -> None:
    decision = Guard().veto(checkpoint, predicted)
    assert not decision.accepted
    assert "predicted state" in decision.reason or "checkpoint" in decision.reason


MakeHistory = Callable[..., Any]
ITERATIONS = [700, 750, 800, 850, 900, 950, 1000]
TARGET = Target(1060, 1060.0, 1.0)


def walk(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.zeros(30), torch.ones(11)
    out = []
    for _ in ITERATIONS:
        a, b = a + torch.randn(30, generator=generator), b + 0.01
        out.append({"a": a, "b": b})
    return out


def test_norms_are_those_of_the_whole_tensors(make_history: MakeHistory) -> None:
    weights = walk()
    history = make_history(ITERATIONS, weights)
    predictor = LinePredictor(gain=2.0, window_iterations=250)  # six checkpoints, all of weight
    forecast = predictor.forecast(history, TARGET)
    pieces = predictor.predict(history, forecast)
    short = ((name, at, values[at : at + 4]) for name, _, values in pieces for at in range(0, len(values), 4))
    norms = measure(history, forecast, short)
    predicted = torch.cat([values for name, _, values in predictor.predict(history, forecast) if name == "a"])
    assert norms.operators == ("a", "b")
    assert norms.predicted_squared[0].item() == pytest.approx((predicted - weights[-1]["a"]).square().sum().item())
    steps = [(weights[k + 1]["a"] - weights[k]["a"]).square().sum().item() for k in range(1, 6)]
    assert norms.history_squared[0].tolist() == pytest.approx([*steps, 0.0])
    assert norms.not_finite.tolist() == [0.0, 0.0]


def test_norms_of_ranks_add_up_to_those_of_one(make_history: MakeHistory) -> None:
    weights = walk()
    predictor = LinePredictor(gain=1.0, window_iterations=300)

    def scales_of(histories: list[Any]) -> list[torch.Tensor]:
        parts = []
        for history in histories:
            forecast = predictor.forecast(history, TARGET)
            parts.append(measure(history, forecast, predictor.predict(history, forecast), ["a", "b"]))
        predicted = torch.stack([part.predicted_squared for part in parts]).sum(0)
        path = torch.stack([part.history_squared for part in parts]).sum(0)
        for part in parts:
            part.predicted_squared.copy_(400 * predicted)  # steps twenty times as long, beyond the limit
            part.history_squared.copy_(path)
        return [Guard().limit(part) for part in parts]

    whole = scales_of([make_history(ITERATIONS, weights)])[0]
    left = [{"a": step["a"][:17]} for step in weights]
    right = [{"a": step["a"][17:], "b": step["b"]} for step in weights]
    first, second = scales_of([make_history(ITERATIONS, left), make_history(ITERATIONS, right)])
    assert whole[0] < 1.0
    assert first[0].item() == pytest.approx(whole[0].item())
    torch.testing.assert_close(second, whole)


def test_values_that_are_not_finite_are_counted_and_vetoed(make_history: MakeHistory) -> None:
    top = torch.finfo(torch.float32).max
    history = make_history([980, 990, 1000], [{"w": torch.tensor([k * 0.5 * top, 1.0])} for k in (-2, 0, 2)])
    predictor = LinePredictor(gain=2.0, window_iterations=300)
    target = Target(1020, 1020.0, 1.0)
    forecast = predictor.forecast(history, target)
    norms = measure(history, forecast, predictor.predict(history, forecast))
    decision = Guard().finite(norms)
    assert not decision.accepted
    assert decision.numbers == {"not_finite": 1, "operators": ["w"]}
    assert Guard().limit(norms).tolist() == [1.0]


@pytest.mark.parametrize(
    ("skip", "recomputed", "lengths"),
    [
        (20.0, 30.0, [1.0, 0.5, 0.25, 0.0]),
        (20.0, None, [1.0, 0.5, 0.25, 0.0]),
        (27.0, 30.0, [1.0, 0.5, 0.25]),  # skipping 30 iterations costs 27 ± 10, of which half counts
        (27.0, None, [1.0, 0.5, 0.25]),
        (37.0, 30.0, [1.0]),
    ],
)
def test_vetoes_lead_to_shorter_moves_and_to_none_where_that_certainly_costs_less_than_recomputing(
    skip: float, recomputed: float | None, lengths: list[float]
) -> None:
    settings = {"move_iterations": -20.0, "expected_deviation_iterations": 10.0, "horizon_iterations": 30}
    forecast = Forecast("line", True, {"w": (-1.0, 2.0)}, skip - 20.0, "", settings)
    tried = list(attempts(forecast, recomputed))
    assert [length for length, _ in tried] == lengths
    for length, one in tried:
        assert one.coefficients == {"w": (-length, 1.0 + length)}
        assert one.expected_end_cost_iterations == skip - 20.0 * length
        assert one.move_iterations == -20.0 * length
        assert one.method == ("line" if length else "stale")
