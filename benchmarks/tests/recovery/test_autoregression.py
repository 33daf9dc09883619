import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.benchmarks.recovery.methods.autoregression import (
    RidgeAutoregression,
    autoregression,
    continued_row,
    not_growing,
)
from cpsr.predictor.gram import gram
from cpsr.predictor.protocol import Target

MakeHistory = Callable[..., Any]


def process(coefficients: list[float], count: int, size: int = 50, noise: float = 0.0, seed: int = 0) -> torch.Tensor:
    """`count` positions `(count, size)` whose velocities follow the autoregression, in float64."""
    generator = torch.Generator().manual_seed(seed)
    velocities = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in coefficients]
    while len(velocities) < count - 1:
        shock = noise * torch.randn(size, generator=generator, dtype=torch.float64)
        velocities.append(sum((a * velocities[-1 - lag] for lag, a in enumerate(coefficients)), shock))
    return torch.cumsum(torch.stack([torch.zeros(size, dtype=torch.float64), *velocities]), dim=0)


def products(positions: torch.Tensor) -> Any:
    velocities = positions.diff(dim=0)
    return (velocities @ velocities.T).numpy()


@settings(deadline=None)
@given(st.floats(-0.99, 0.99).filter(lambda a: abs(a) > 0.05), st.integers(3, 12), st.integers(0, 99))
def test_an_exact_first_order_process_is_recovered_as_the_ridge_vanishes(a: float, count: int, seed: int) -> None:
    matrix = products(process([a], count, seed=seed))
    before = matrix.diagonal()[:-1].mean()
    for ridge in (1e-2, 1e-4, 1e-8):
        shrunk = a * before / (before + ridge * matrix.diagonal().mean())
        assert autoregression(matrix, 1, ridge)[0] == pytest.approx(shrunk, rel=1e-9)
    assert autoregression(matrix, 1, 1e-10)[0] == pytest.approx(a, rel=1e-6)


def test_a_second_order_process_is_recovered_as_the_ridge_vanishes() -> None:
    matrix = products(process([0.5, -0.3], 9))
    assert autoregression(matrix, 2, 1e-10) == pytest.approx([0.5, -0.3], abs=1e-6)


def test_the_coefficient_is_found_under_noise() -> None:
    size = 20_000  # standard error about 1 / sqrt(6 * 20000) = 0.003
    matrix = products(process([0.6], 8, size=size, noise=1.0))
    assert autoregression(matrix, 1, 1e-6)[0] == pytest.approx(0.6, abs=0.015)


def test_through_a_history_the_coefficient_is_the_same(make_history: MakeHistory) -> None:
    positions = process([0.7], 8, size=300)
    history = make_history(list(range(8)), [{"w": 1.0 + values.float()} for values in positions])
    found = autoregression(gram(history, "w").numpy(), 1, 1e-9)[0]
    assert found == pytest.approx(0.7, abs=1e-5)  # weights near 1 hold velocities of 1 to 1e-7 each


def test_a_tensor_that_has_only_begun_to_move_gets_finite_coefficients() -> None:
    matrix = numpy.zeros((5, 5))
    matrix[4, 4] = 1.0
    assert autoregression(matrix, 2, 1e-2) == pytest.approx([0.0, 0.0])


@given(st.floats(-1, 1), st.floats(0, 5))
def test_the_continued_row_follows_the_process(a: float, gaps: float) -> None:
    times = [2.0, 2.5, 3.0, 3.5]
    row = continued_row(times, numpy.array([a]), 3.5 + 0.5 * gaps)
    assert row.sum() == pytest.approx(1.0)
    velocity, moved = a, 0.0
    for step in range(6):
        moved += velocity * min(max(gaps - step, 0.0), 1.0)
        velocity *= a
    # The newest difference is 1 per gap, and goes on as the process makes of it.
    assert row @ numpy.array([0.0, 0.0, 0.0, 1.0]) == pytest.approx(1.0 + moved)


def test_uneven_gaps_count_as_velocities() -> None:
    times = [0.0, 1.0, 3.0, 3.5]
    row = continued_row(times, numpy.array([1.0]), 3.9)
    assert row @ numpy.array(times) == pytest.approx(3.9)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4))
def test_no_mode_grows(coefficients: list[float]) -> None:
    scaled = not_growing(numpy.array(coefficients))
    roots = numpy.roots([1.0, *(-scaled)])
    assert max(abs(roots), default=0.0) <= 1.0 + 1e-3  # repeated roots are found to the fourth root of the rounding
    inside = numpy.roots([1.0, *(-numpy.array(coefficients))])
    if max(abs(inside), default=0.0) < 0.999:
        assert scaled.tolist() == coefficients


@pytest.mark.parametrize("a", [-0.5, 0.5, 0.9])
def test_it_beats_standing_still_and_the_secant_on_its_own_process(make_history: MakeHistory, a: float) -> None:
    positions = process([a], 10, size=200, noise=0.1)
    iterations = list(range(600, 1001, 50))
    history = make_history(iterations, [{"w": values.float()} for values in positions[:-1]])
    predictor = RidgeAutoregression()
    forecast = predictor.forecast(history, Target(1050, 1050.0, 1.0))
    out = torch.cat([values for _, _, values in predictor.predict(history, forecast)])
    truth, newest, before = positions[-1].float(), positions[-2].float(), positions[-3].float()
    assert (out - truth).norm() < 0.95 * (newest - truth).norm()
    assert (out - truth).norm() < (2 * newest - before - truth).norm()


def test_each_tensor_has_coefficients_of_its_own(make_history: MakeHistory) -> None:
    swinging, drifting = process([-0.9], 9, noise=0.1), process([0.9], 9, noise=0.1)
    weights = [
        {"a": a.float(), "b": b.float(), "still": torch.ones(3)} for a, b in zip(swinging, drifting, strict=True)
    ]
    forecast = RidgeAutoregression().forecast(
        make_history(list(range(600, 1001, 50)), weights), Target(1050, 1050.0, 1.0)
    )
    assert forecast.coefficients["a"][-1] < 1.0 < forecast.coefficients["b"][-1]
    assert forecast.coefficients["still"] == (0.0,) * 8 + (1.0,)
    assert forecast.settings["used_iterations"] == list(range(600, 1001, 50))


def last_move(predictor: RidgeAutoregression, history: Any, target: Target) -> torch.Tensor:
    """Predicted minus newest weights of operator `w`."""
    out = torch.cat([values for _, _, values in predictor.predict(history, predictor.forecast(history, target))])
    newest: torch.Tensor = history.read("w", len(history.entries) - 1, 0, out.numel())
    return out - newest


def test_growing_velocities_do_not_explode(make_history: MakeHistory) -> None:
    weights = [{"w": torch.full((4,), 2.0**k)} for k in range(9)]
    history = make_history(list(range(600, 1001, 50)), weights)
    moved = last_move(RidgeAutoregression(), history, Target(1400, 1400.0, 1.0))
    assert float(moved.max()) <= 8 * 128  # no faster than the newest velocity over 8 intervals; doubling on: 65280
    assert float(moved.min()) > 128


def test_a_line_over_uneven_gaps_goes_on(make_history: MakeHistory) -> None:
    iterations = [600, 610, 700, 710, 800, 810, 900, 910, 1000]
    history = make_history(iterations, [{"w": torch.full((4,), i / 100)} for i in iterations])
    moved = last_move(RidgeAutoregression(), history, Target(1040, 1040.0, 1.0))
    torch.testing.assert_close(moved, torch.full((4,), 0.4), rtol=0.02, atol=0)  # the ridge takes about 1%


def test_the_window_is_400_iterations_and_at_least_three_checkpoints(make_history: MakeHistory) -> None:
    for gap, count in ((50, 9), (300, 3)):
        iterations = list(range(3000 - 11 * gap + gap, 3001, gap))
        weights = [{"w": values.float()} for values in process([0.5], len(iterations), noise=1.0)]
        forecast = RidgeAutoregression().forecast(make_history(iterations, weights), Target(3010, 3010.0, 1.0))
        assert len(forecast.settings["used_iterations"]) == count
        assert all(
            (value != 0.0) <= (place >= len(iterations) - count)
            for place, value in enumerate(forecast.coefficients["w"])
        )
    assert all(b - a == 300 for a, b in itertools.pairwise(forecast.settings["used_iterations"]))
