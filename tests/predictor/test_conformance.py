"""What every predictor of the product must keep to, whatever its method."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cpsr.predictor.calibration import HORIZON_ITERATIONS, YOUNGEST_ITERATIONS
from cpsr.predictor.guard import attempts
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.network import PARAMETERS, pretrained_parameters
from cpsr.predictor.protocol import STALE_METHOD, Forecast, History, HistoryEntry, Target
from cpsr.predictor.training import Head
from cpsr.predictor.vitp import VITPPredictor
from cpsr.predictor.weight_pieces import CHUNK_ELEMENTS

MakeHistory = Callable[..., Any]
ITERATIONS = list(range(600, 1001, 50))
TARGET = Target(1030, 1030.0, 1.0)


def turning(**options: Any) -> VITPPredictor:
    """VITP with a network of random weights: its directions are far from the line's."""
    predictor = VITPPredictor(direction="vitp", **options)
    state = predictor.state_dict()
    noise = torch.randn(PARAMETERS, generator=torch.Generator().manual_seed(0))
    state["vitp"]["head"] = vars(Head.of(pretrained_parameters() + 0.1 * noise))
    predictor.load_state_dict(state)
    return predictor


METHODS: dict[str, Callable[..., LinePredictor]] = {"line": LinePredictor, "vitp": turning}

every_method = pytest.mark.parametrize("method", METHODS)


def walk(count: int, seed: int = 0, sizes: tuple[int, ...] = (37, 5)) -> list[dict[str, torch.Tensor]]:
    """A random walk with a drift, in float32."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"w{place}" for place in range(len(sizes))]
    drift = {name: torch.randn(size, generator=generator) for name, size in zip(names, sizes, strict=True)}
    noise = [
        {name: torch.randn(size, generator=generator) for name, size in zip(names, sizes, strict=True)}
        for _ in range(count)
    ]
    return [{name: 3.0 + 0.1 * k * drift[name] + 0.05 * noise[k][name] for name in names} for k in range(count)]


def predicted(predictor: LinePredictor, history: History, forecast: Forecast) -> dict[str, torch.Tensor]:
    """The whole tensors; fails unless the pieces cover every element exactly once, in float32."""
    out = {operator: torch.full((history.numel(operator),), math.nan) for operator in history.operators}
    seen = {operator: torch.zeros(history.numel(operator), dtype=torch.int64) for operator in history.operators}
    for operator, start, values in predictor.predict(history, forecast):
        assert values.dtype == torch.float32
        assert values.dim() == 1
        out[operator][start : start + values.numel()] = values
        seen[operator][start : start + values.numel()] += 1
    assert all(bool((count == 1).all()) for count in seen.values())
    return out


def predict(predictor: LinePredictor, history: History, target: Target = TARGET) -> dict[str, torch.Tensor]:
    forecast = predictor.forecast(history, target)
    assert forecast.feasible, forecast.reason
    return predicted(predictor, history, forecast)


@every_method
def test_an_ordinary_failure_is_feasible_and_says_what_it_is(make_history: MakeHistory, method: str) -> None:
    history = make_history(ITERATIONS, walk(9))
    forecast = METHODS[method]().forecast(history, TARGET)
    assert forecast.feasible
    assert forecast.method == method
    assert forecast.expected_end_cost_iterations <= 30.0
    assert forecast.settings["base_iteration"] == 1000
    assert forecast.settings["used_iterations"][-1] == 1000
    assert "30 iterations ahead" in forecast.reason
    out = predicted(METHODS[method](), history, forecast)
    assert all(bool(torch.isfinite(values).all()) for values in out.values())


@every_method
def test_a_learning_rate_of_zero_since_the_checkpoint_leaves_it_as_it_is(
    make_history: MakeHistory, method: str
) -> None:
    weights = walk(9)
    out = predict(METHODS[method](), make_history(ITERATIONS, weights), Target(1030, 1000.0, 1.0))
    assert all(torch.equal(out[name], weights[-1][name]) for name in out)


def test_a_move_at_a_learning_rate_of_zero_is_none_and_gains_nothing(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, walk(9))
    history.entries = (*history.entries[:-1], replace(history.entries[-1], learning_rate=0.0))
    forecast = LinePredictor().forecast(history, Target(1000, 1000.0, 1.0, moves=True))
    assert (forecast.method, forecast.expected_end_cost_iterations) == ("stale", 0.0)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[HistoryEntry], Target]:
    """Checkpoints at irregular iterations and learning rates, some zero, and a failure after them."""
    gaps = draw(st.lists(st.integers(1, 120), min_size=1, max_size=12))
    rates = draw(st.lists(st.sampled_from([0.0, 1e-6, 1e-4, 1e-3]), min_size=len(gaps), max_size=len(gaps)))
    iterations = list(itertools.accumulate([draw(st.integers(0, 2000)), *gaps]))
    times = list(itertools.accumulate([0.0, *(gap * rate for gap, rate in zip(gaps, rates, strict=True))]))
    entries = [HistoryEntry(i, t, r) for i, t, r in zip(iterations, times, [*rates, rates[-1]], strict=True)]
    ahead = draw(st.integers(0, 300))
    return entries, Target(iterations[-1] + ahead, times[-1] + ahead * draw(st.sampled_from([0.0, *rates])), 1e-3)


@every_method
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(situation=situations(), seed=st.integers(0, 2**16), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_random_histories_are_refused_or_predicted_finitely(
    make_history: MakeHistory, method: str, situation: tuple[list[HistoryEntry], Target], seed: int, scale: float
) -> None:
    entries, target = situation
    generator = torch.Generator().manual_seed(seed)
    weights = [{"w": scale * torch.randn(11, generator=generator)} for _ in entries]
    history = type(make_history([1], [{}]))(entries, weights)
    predictor = METHODS[method]()
    forecast = predictor.forecast(history, target)
    if not forecast.feasible:
        assert forecast.coefficients == {}
        assert forecast.reason
        with pytest.raises(ValueError, match="not feasible"):
            predictor.predict(history, forecast)
        return
    row = forecast.coefficients["w"]
    assert len(row) == len(entries)
    assert math.fsum(row) == pytest.approx(1.0, abs=1e-9)
    out = predicted(predictor, history, forecast)["w"]
    exact = sum(c * step["w"].double() for c, step in zip(row, weights, strict=True))
    assert isinstance(exact, torch.Tensor)
    size = scale * 4.0 * sum(abs(c) for c in row)  # 4 standard deviations bound 11 normal values well enough
    torch.testing.assert_close(out.double(), exact, rtol=0.0, atol=1e-6 * size)


@every_method
def test_large_operators_are_read_and_predicted_in_pieces(make_history: MakeHistory, method: str) -> None:
    size = CHUNK_ELEMENTS + 37
    history = make_history(ITERATIONS, walk(9, sizes=(size,)))
    forecast = METHODS[method]().forecast(history, TARGET)
    out = predicted(METHODS[method](), history, forecast)["w0"]
    assert history.largest_piece == CHUNK_ELEMENTS
    for place in (0, size - 1):
        rows = enumerate(forecast.coefficients["w0"])
        expected = sum(row * float(history.read("w0", entry, place, place + 1)) for entry, row in rows)
        assert float(out[place]) == pytest.approx(expected)


@every_method
@pytest.mark.parametrize(("count", "failure"), [(0, 30), (9, 1501)])
def test_infeasible_says_why_and_is_not_predicted(
    make_history: MakeHistory, method: str, count: int, failure: int
) -> None:
    history = make_history(ITERATIONS[:count], walk(count))
    predictor = METHODS[method]()
    forecast = predictor.forecast(history, Target(failure, float(failure), 1.0))
    assert not forecast.feasible
    assert forecast.coefficients == {}
    assert (
        "no usable checkpoint" in forecast.reason if count == 0 else f"{failure - 1000} iterations" in forecast.reason
    )
    with pytest.raises(ValueError, match="not feasible"):
        predictor.predict(history, forecast)


def stale(forecast: Forecast, entries: int) -> bool:
    """Whether it leaves the weights of the newest checkpoint."""
    return forecast.method == STALE_METHOD and set(forecast.coefficients.values()) == {(0.0,) * (entries - 1) + (1.0,)}


@every_method
@pytest.mark.parametrize("count", [1, 2])
def test_without_a_line_the_checkpoint_goes_on_with_the_same_bits(
    make_history: MakeHistory, method: str, count: int
) -> None:
    weights = walk(count)
    weights[-1]["w0"][:2] = torch.tensor([-0.0, 0.0])
    history = make_history(ITERATIONS[-count:], weights)
    predictor = METHODS[method]()
    forecast = predictor.forecast(history, TARGET)
    assert stale(forecast, count)
    assert "no line" in forecast.reason
    assert ("there is one" if count == 1 else "there are 2") in forecast.reason
    assert forecast.move_iterations == 0.0
    assert forecast.expected_end_cost_iterations == forecast.settings["skip_iterations"]
    out = predicted(predictor, history, forecast)
    assert all(torch.equal(out[name].view(torch.int32), weights[-1][name].view(torch.int32)) for name in out)


@every_method
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    situation=situations(),
    seed=st.integers(0, 2**16),
    shares=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=2).map(sorted),
)
def test_what_is_tried_certainly_costs_less_than_recomputing_and_a_larger_loss_no_less(
    make_history: MakeHistory,
    method: str,
    situation: tuple[list[HistoryEntry], Target],
    seed: int,
    shares: list[float],
) -> None:
    entries, target = situation
    generator = torch.Generator().manual_seed(seed)
    weights = [{"w": torch.randn(11, generator=generator)} for _ in entries]
    history = type(make_history([1], [{}]))(entries, weights)
    horizon = target.iteration - entries[-1].iteration
    found = [METHODS[method]().forecast(history, replace(target, lost_share=share)) for share in shares]
    assume(all(forecast.feasible for forecast in found))
    few, many = (forecast.settings["skip_iterations"] for forecast in found)
    assert few <= many or horizon > HORIZON_ITERATIONS or entries[-1].iteration < YOUNGEST_ITERATIONS
    for forecast in found:
        tried = list(attempts(forecast, horizon)) if forecast.bound_iterations < horizon else []
        assert all(one.bound_iterations < horizon for _, one in tried)
        assert [length for length, _ in tried] == sorted((length for length, _ in tried), reverse=True)
        assert all(
            (length > 0.0 and not stale(forecast, len(entries))) or stale(one, len(entries)) for length, one in tried
        )


@every_method
def test_asked_to_move_at_the_checkpoint_it_moves_where_that_gains(make_history: MakeHistory, method: str) -> None:
    history = make_history(ITERATIONS, walk(9))
    here = Target(1000, 1000.0, 20.0)  # late: the learning rate is a twentieth of its peak
    assert stale(METHODS[method]().forecast(history, here), 9)
    forecast = METHODS[method]().forecast(history, replace(here, moves=True))
    assert forecast.method == method
    assert forecast.settings["skip_iterations"] == 0.0
    assert forecast.bound_iterations < 0.0
    failed = METHODS[method]().forecast(history, Target(1030, 1030.0, 20.0))
    assert forecast.move_iterations == pytest.approx(failed.move_iterations, rel=0.2)


@every_method
@pytest.mark.parametrize("bad", [4, 8])
def test_a_damaged_checkpoint_counts_as_absent(make_history: MakeHistory, method: str, bad: int) -> None:
    weights = walk(9)
    iterations, target = [800, 825, 850, 875, 900, 925, 950, 990, 1000], Target(1008, 1008.0, 1.0)
    others = [place for place in range(9) if place != bad]
    expected = predict(
        METHODS[method](), make_history([iterations[k] for k in others], [weights[k] for k in others]), target
    )
    broken = [{name: values.clone() for name, values in step.items()} for step in weights]
    broken[bad]["w1"][2] = math.nan
    history = make_history(iterations, broken)
    forecast = METHODS[method]().forecast(history, target)
    out = predicted(METHODS[method](), history, forecast)
    assert all(torch.equal(out[name], expected[name]) for name in out)
    assert forecast.settings["left_out_not_finite"] in ([], [iterations[bad]])
    if bad == 8:
        assert forecast.settings["base_iteration"] == 990
        assert "left out" in forecast.reason


@every_method
@pytest.mark.parametrize(
    ("times", "target", "words"),
    [
        ([1.0, 3.0, 2.0, 4.0], Target(410, 5.0, 1.0), "falls after iteration 200"),
        ([1.0, 2.0, math.nan, 4.0], Target(410, 5.0, 1.0), "iteration 300: time or learning rate is not finite"),
        ([1.0, 2.0, 3.0, 4.0], Target(410, 3.5, 1.0), "lies before"),
    ],
)
def test_impossible_times_are_an_error(
    make_history: MakeHistory, method: str, times: list[float], target: Target, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        METHODS[method]().forecast(make_history([100, 200, 300, 400], walk(4), times=times), target)


@every_method
def test_an_operator_that_some_checkpoint_has_of_an_earlier_iteration_keeps_its_newest_value(
    make_history: MakeHistory, method: str
) -> None:
    weights = walk(9, sizes=(11,))
    expected = predict(METHODS[method](), make_history(ITERATIONS, weights))["w0"]
    both = [{"expert": step["w0"] + k, **step} for k, step in enumerate(weights)]
    taken = {"expert": [*ITERATIONS[:4], ITERATIONS[3], *ITERATIONS[5:]]}
    history = make_history(ITERATIONS, both, taken=taken)
    forecast = METHODS[method]().forecast(history, TARGET)
    assert forecast.settings["held_names"] == ["expert"]
    assert "1 operators keep their newest value" in forecast.reason
    out = predicted(METHODS[method](), history, forecast)
    torch.testing.assert_close(out["w0"], expected)
    assert torch.equal(out["expert"], both[-1]["expert"])
    refused = METHODS[method]().forecast(
        make_history(ITERATIONS, [{"expert": step["w0"]} for step in weights], taken=taken), TARGET
    )
    assert not refused.feasible
    assert "no operator here was saved in every checkpoint" in refused.reason


@every_method
def test_a_tensor_that_changed_its_shape_is_an_error(make_history: MakeHistory, method: str) -> None:
    weights = walk(9)
    weights[8]["w0"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"'w0' at iteration 1000: .* change its shape"):
        METHODS[method]().forecast(make_history(ITERATIONS, weights), TARGET)


def learned(predictor: LinePredictor, history: History) -> None:
    for _ in predictor.learn(history):
        pass


def grown(make_history: MakeHistory, weights: list[dict[str, torch.Tensor]]) -> list[Any]:
    """The history after each checkpoint."""
    return [make_history(ITERATIONS[: count + 1], weights[: count + 1]) for count in range(len(weights))]


@every_method
def test_learning_alters_no_weights_and_draws_no_random_numbers(make_history: MakeHistory, method: str) -> None:
    weights, predictor = walk(9), METHODS[method]()
    before = [{name: values.clone() for name, values in step.items()} for step in weights]
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    for history in grown(make_history, weights):
        learned(predictor, history)
    assert torch.equal(torch.get_rng_state(), expected)
    assert all(torch.equal(step[name], kept[name]) for step, kept in zip(weights, before, strict=True) for name in step)


@every_method
@pytest.mark.parametrize(("kind", "bad"), [("nan", 8), ("inf", 4), ("pause", 8), ("constant", 8)])
def test_learning_from_bad_checkpoints_leaves_prediction_sound(
    make_history: MakeHistory, method: str, kind: str, bad: int
) -> None:
    weights, predictor = walk(9), METHODS[method]()
    if kind == "constant":
        weights = [{**step, "w1": weights[0]["w1"]} for step in weights]
    elif kind == "pause":
        weights[bad] = weights[bad - 1]
    else:
        weights[bad] = {**weights[bad], "w0": torch.full((37,), float(kind))}
    for history in grown(make_history, weights):
        learned(predictor, history)
    assert all(math.isfinite(number) for number in numbers(predictor.state_dict()))
    history = make_history(ITERATIONS, weights)
    forecast = predictor.forecast(history, Target(1010, 1010.0, 1.0))
    assert forecast.feasible, forecast.reason
    assert forecast.settings["left_out_not_finite"] in ([], [ITERATIONS[bad]])
    out = predicted(predictor, history, forecast)
    assert all(bool(torch.isfinite(values).all()) for values in out.values())


def numbers(data: Any) -> list[float]:
    """Every number in plain data and its tensors."""
    if isinstance(data, dict):
        return [number for value in data.values() for number in numbers(value)]
    if isinstance(data, list | tuple):
        return [number for value in data for number in numbers(value)]
    if isinstance(data, torch.Tensor):
        return [float(number) for number in data.flatten().tolist()]
    return [float(data)] if isinstance(data, int | float) else []
