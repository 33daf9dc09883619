import math

import pytest
import torch

from cpsr.predictor.displacement import Displacements
from cpsr.predictor.guard import Guard


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
    half = 1.0 if predicted <= 1.5 else 1.5 / predicted
    assert Guard(displacement_limit=0.5).limit(moved).item() == pytest.approx(half)


def test_a_step_where_history_never_moved_is_taken_back() -> None:
    scale = Guard().limit(norms(1.0, [0.0, 0.0])).item()
    assert 0.0 < scale < 1e-300


def test_finite_passes() -> None:
    assert Guard().finite(norms(1.0, [1.0])).accepted


@pytest.mark.parametrize(("predicted", "accepted"), [(1.9, True), (2.29, True), (2.31, False), (50.0, False)])
def test_veto(predicted: float, accepted: bool) -> None:
    decision = Guard().veto(2.0, predicted)
    assert decision.accepted is accepted
    assert decision.numbers["excess_nats"] == pytest.approx(predicted - 2.0)
    assert f"{predicted:.4f}" in decision.reason
    assert Guard().veto(2.0, predicted, tolerance_nats=100.0).accepted


@pytest.mark.parametrize(("checkpoint", "predicted"), [(2.0, math.nan), (2.0, math.inf), (math.nan, 2.0)])
def test_losses_that_are_not_finite_are_a_veto(checkpoint: float, predicted: float) -> None:
    decision = Guard().veto(checkpoint, predicted)
    assert not decision.accepted
    assert "predicted state" in decision.reason or "checkpoint" in decision.reason


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_limits_are_errors(value: float) -> None:
    with pytest.raises(ValueError, match="loss_tolerance_nats"):
        Guard(loss_tolerance_nats=value)
    with pytest.raises(ValueError, match="displacement_limit"):
        Guard(displacement_limit=value)
