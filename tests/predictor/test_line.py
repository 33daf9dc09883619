import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.predictor.calibration import Calibration, Context, Setting
from cpsr.predictor.line import CAUTION_DEVIATIONS, LinePredictor, line_coefficients
from cpsr.predictor.prior import context_of, windows
from cpsr.predictor.prior import settings as prior_settings
from cpsr.predictor.protocol import Forecast, History, HistoryEntry, StatePredictor, Target
from cpsr.predictor.series_predictor import MAX_OUTCOMES

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


def test_it_is_a_state_predictor() -> None:
    predictor: StatePredictor = LinePredictor()
    assert predictor.name == "line"


@pytest.mark.parametrize("gain", [0.0, 1.0, 1.5, 2.0])
def test_weights_on_a_line_move_along_it(make_history: MakeHistory, gain: float) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    predictor = LinePredictor(window_iterations=300, gain=gain, chunk_elements=3)
    out = predicted(predictor, history, predictor.forecast(history, Target(1030, 1030.0, 1.0)))
    expected = 0.5 + torch.linspace(-1, 1, 7) * ((1000 + gain * 30) / 1000)
    torch.testing.assert_close(out["w"], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out["still"], torch.full((3,), 0.1))
    assert history.largest_piece == 3


def test_the_row_is_the_least_squares_fit() -> None:
    rng = numpy.random.default_rng(3)
    times, values = numpy.sort(rng.uniform(0, 1, 9)), rng.normal(size=9)
    slope, intercept = numpy.polyfit(times, values, 1)
    for base, start in ((0.0, values[-1]), (1.0, intercept + slope * times[-1])):
        row = line_coefficients(times.tolist(), 1.5, gain=1.7, base=base)
        assert numpy.dot(row, values) == pytest.approx(start + 1.7 * slope * (1.5 - times[-1]))


@given(
    st.lists(st.floats(0, 10), min_size=3, max_size=12, unique=True).filter(lambda t: max(t) - min(t) > 1e-3),
    st.floats(0, 1),
    st.floats(0, 2),
    st.floats(0, 1),
)
def test_rows_sum_to_one_and_keep_the_newest(times: list[float], reach: float, gain: float, base: float) -> None:
    times = sorted(times)
    row = line_coefficients(times, times[-1] + reach * (times[-1] - times[0]), gain, base)
    assert math.fsum(row) == pytest.approx(1.0, abs=1e-12)
    assert row[-1] > 0


@settings(max_examples=25)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.integers(1, 290))
def test_constant_tensors_predict_themselves(make_history: MakeHistory, values: list[float], horizon: int) -> None:
    constant = torch.tensor(values)
    history = make_history(ITERATIONS, [{"w": constant.clone()} for _ in ITERATIONS])
    predictor = LinePredictor()
    forecast = predictor.forecast(history, Target(1000 + horizon, 1000.0 + horizon, 1.0))
    assert torch.equal(predicted(predictor, history, forecast)["w"], constant)


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


def test_horizon_zero_is_the_checkpoint_itself(make_history: MakeHistory) -> None:
    for count in (1, len(ITERATIONS)):
        iterations = ITERATIONS[-count:]
        weights = [{"w": torch.randn(5)} for _ in iterations]
        history = make_history(iterations, weights)
        predictor = LinePredictor()
        forecast = predictor.forecast(history, Target(1000, 1000.0, 1.0))
        assert forecast.feasible
        assert forecast.expected_end_cost_iterations == 0.0
        out = predicted(predictor, history, forecast)["w"]
        assert torch.equal(out, weights[-1]["w"])
        assert out.data_ptr() != weights[-1]["w"].data_ptr()


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
    plain = numpy.array(line_coefficients([float(i) for i in ITERATIONS], 1040.0, gain=1.0, base=0.0))[:-1]
    factors = {name: row[0] / plain[0] for name, row in forecast.coefficients.items()}
    for name, row in forecast.coefficients.items():
        assert row[:-1] == pytest.approx(factors[name] * plain)
    assert factors["bent"] < 1.0 < factors["straight"] <= 2.0
    lowest, _, highest = forecast.settings["operator_factors"]
    assert (lowest, highest) == pytest.approx((factors["bent"], factors["straight"]))
    assert f"({lowest:.1f} to {highest:.1f} times that by operator)" in forecast.reason


def test_a_target_before_the_newest_entry_is_an_error(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    with pytest.raises(ValueError, match="before the newest history entry"):
        LinePredictor().forecast(history, Target(999, 999.0, 1.0))


@pytest.mark.parametrize("iterations", [[100, 100, 200], [100, 300, 200]])
def test_repeated_or_unsorted_entries_are_an_error(make_history: MakeHistory, iterations: list[int]) -> None:
    with pytest.raises(ValueError, match="not ascending"):
        LinePredictor().forecast(make_history(iterations, straight(iterations)), Target(310, 310.0, 1.0))


def test_a_time_that_is_not_finite_is_an_error(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    with pytest.raises(ValueError, match="not finite"):
        LinePredictor().forecast(history, Target(1010, math.nan, 1.0))


@pytest.mark.parametrize(
    ("iterations", "failure", "words"),
    [
        ([1000], 1010, "there is one"),
        ([950, 1000], 1010, "needs 3 usable checkpoints, and there are 2"),
        (ITERATIONS, 1501, "more than 10 intervals|further"),
    ],
)
def test_infeasible_says_why_and_does_not_predict(
    make_history: MakeHistory, iterations: list[int], failure: int, words: str
) -> None:
    history = make_history(iterations, straight(iterations))
    predictor = LinePredictor()
    forecast = predictor.forecast(history, Target(failure, float(failure), 1.0))
    assert not forecast.feasible
    assert forecast.coefficients == {}
    assert forecast.expected_end_cost_iterations == failure - 1000
    with pytest.raises(ValueError, match=words):
        predictor.predict(history, forecast)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("bad", [0, 2, 6])
def test_damaged_checkpoints_are_left_out(make_history: MakeHistory, poison: float, bad: int) -> None:
    weights = straight(ITERATIONS)
    weights[bad]["still"][1] = poison
    history = make_history(ITERATIONS, weights)
    predictor = LinePredictor(gain=1.0, window_iterations=300)
    forecast = predictor.forecast(history, Target(1030, 1030.0, 1.0))
    assert forecast.settings["left_out_not_finite"] == [ITERATIONS[bad]]
    assert str(ITERATIONS[bad]) in forecast.reason
    assert all(row[bad] == 0.0 for row in forecast.coefficients.values())
    out = predicted(predictor, history, forecast)
    torch.testing.assert_close(out["w"], 0.5 + torch.linspace(-1, 1, 7) * 1.03)


def test_damage_that_leaves_two_checkpoints_is_infeasible(make_history: MakeHistory) -> None:
    weights = straight(ITERATIONS)
    for bad in range(5):
        weights[bad]["w"][0] = math.nan
    forecast = LinePredictor().forecast(make_history(ITERATIONS, weights), Target(1030, 1030.0, 1.0))
    assert not forecast.feasible
    assert "there are 2" in forecast.reason
    assert forecast.settings["left_out_not_finite"] == ITERATIONS[:5]


def test_ranks_leave_out_what_any_of_them_must(make_history: MakeHistory) -> None:
    weights = straight(ITERATIONS)
    asked: list[list[int]] = []

    def other_rank_found_one(damaged: Any) -> list[int]:
        asked.append(list(damaged))
        return [2] if len(asked) == 1 else []

    predictor = LinePredictor(agree=other_rank_found_one)
    forecast = predictor.forecast(make_history(ITERATIONS, weights), Target(1030, 1030.0, 1.0))
    assert forecast.settings["left_out_not_finite"] == [ITERATIONS[2]]
    assert asked == [[], []]


def test_learning_rate_zero_keeps_the_checkpoint_and_says_so(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS), learning_rate=0.0)
    predictor = LinePredictor()
    forecast = predictor.forecast(history, Target(1030, 0.0, 1.0))
    assert "learning rate was 0" in forecast.reason
    assert torch.equal(predicted(predictor, history, forecast)["w"], straight(ITERATIONS)[-1]["w"])


def test_a_learning_rate_that_came_back_from_zero_is_infeasible(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS), learning_rate=0.0)
    forecast = LinePredictor(gain=1.0).forecast(history, Target(1030, 0.3, 1.0))
    assert not forecast.feasible
    assert "over the whole window" in forecast.reason


def test_repeated_times_are_one_pause_of_the_schedule() -> None:
    # Two checkpoints at the same time both count; their values are averaged by the fit.
    row = line_coefficients([0.0, 1.0, 1.0, 2.0], 3.0, gain=1.0, base=1.0)
    assert row[1] == pytest.approx(row[2])
    assert numpy.dot(row, [0.0, 0.5, 1.5, 2.0]) == pytest.approx(3.0)


def test_the_time_axis_is_cumulative_learning_rate(make_history: MakeHistory) -> None:
    times = [0.0, 4.0, 7.0, 9.0, 10.0]  # a falling learning rate
    entries = [HistoryEntry(600 + 100 * k, time, 0.01) for k, time in enumerate(times)]
    history = type(make_history([1], [{}]))(entries, [{"w": torch.tensor([time])} for time in times])
    predictor = LinePredictor(window_iterations=400, gain=1.0)
    forecast = predictor.forecast(history, Target(1050, 10.25, 0.05))
    assert predicted(predictor, history, forecast)["w"].item() == pytest.approx(10.25)


def test_operators_of_other_ages_get_rows_of_their_own(make_history: MakeHistory) -> None:
    taken = {"expert": [iteration - 25 for iteration in ITERATIONS], "rare": [675] * 5 + [975] * 2}
    weights = [
        {"w": torch.tensor([i / 1000]), "expert": torch.tensor([(i - 25) / 1000]), "rare": torch.tensor([float(i)])}
        for i in ITERATIONS
    ]
    history = make_history(ITERATIONS, weights, taken=taken)
    predictor = LinePredictor(gain=1.0, window_iterations=300)
    forecast = predictor.forecast(history, Target(1030, 1030.0, 1.0))
    out = predicted(predictor, history, forecast)
    assert out["w"].item() == pytest.approx(1.03)
    assert out["expert"].item() == pytest.approx(1.03)
    assert out["rare"].item() == 1000.0  # two snapshots of its own carry no line
    assert forecast.settings["held_names"] == ["rare"]
    assert "1 operators keep" in forecast.reason
    assert forecast.settings["own_series_operators"] == 1
    assert "1 operators follow snapshots" in forecast.reason


def test_a_state_is_expected_to_be_no_better_than_its_oldest_operators(make_history: MakeHistory) -> None:
    """As where ranks have intervals of their own; what it is measured to cost is then of no one setting."""
    weights = straight(ITERATIONS)
    target, predictor = Target(1010, 1010.0, 1.0), LinePredictor(gain=0.1, window_iterations=300)
    newest = predictor.forecast(make_history(ITERATIONS, weights), target)
    older = [iteration - 60 for iteration in ITERATIONS]
    before = predictor.forecast(make_history(older, weights), target)
    found = predictor.forecast(make_history(ITERATIONS, weights, taken={"w": older}), target)
    assert (
        newest.expected_end_cost_iterations < before.expected_end_cost_iterations == found.expected_end_cost_iterations
    )
    assert "own_series_operators" not in newest.settings
    state = predictor.state_dict()
    predictor.record({"kind": "recovery", "settings": found.settings, "lag_iterations": -90.0})
    assert predictor.forecast(make_history(ITERATIONS, weights), target) == newest
    assert predictor.state_dict()["direction"] == state["direction"]


def test_a_failure_right_at_a_checkpoint_that_holds_older_weights_too(make_history: MakeHistory) -> None:
    older = [iteration - 60 for iteration in ITERATIONS]
    weights = [{"w": torch.tensor([i / 1000]), "old": torch.tensor([(i - 60) / 1000])} for i in ITERATIONS]
    history = make_history(ITERATIONS, weights, taken={"old": older})
    predictor = LinePredictor(gain=1.0, window_iterations=300)
    forecast = predictor.forecast(history, Target(1000, 1000.0, 1.0))
    out = predicted(predictor, history, forecast)
    assert out["w"].item() == weights[-1]["w"].item()
    assert out["old"].item() == pytest.approx(1.0)
    assert forecast.settings["own_series_operators"] == 1


def test_nothing_to_predict_for_any_operator_is_infeasible(make_history: MakeHistory) -> None:
    weights = straight(ITERATIONS)
    history = make_history(ITERATIONS, weights, taken={"w": [650] * 7, "still": [650] * 7})
    forecast = LinePredictor().forecast(history, Target(1030, 1030.0, 1.0))
    assert not forecast.feasible
    assert "'w': a prediction needs 3 usable checkpoints, and there is one" in forecast.reason


def test_a_tensor_that_changed_its_shape_is_an_error(make_history: MakeHistory) -> None:
    weights = straight(ITERATIONS)
    weights[2]["w"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"iteration 800.*change its shape"):
        LinePredictor().forecast(make_history(ITERATIONS, weights), Target(1030, 1030.0, 1.0))


def test_a_forecast_of_another_history_is_refused(make_history: MakeHistory) -> None:
    predictor = LinePredictor()
    forecast = predictor.forecast(make_history(ITERATIONS, straight(ITERATIONS)), Target(1030, 1030.0, 1.0))
    shorter = make_history(ITERATIONS[1:], straight(ITERATIONS[1:]))
    with pytest.raises(ValueError, match="must be 6 numbers"):
        list(predictor.predict(shorter, forecast))


def test_memory_is_a_few_chunks_whatever_the_history(make_history: MakeHistory) -> None:
    chunk = 1 << 14
    weights = [{"w": torch.randn(40 * chunk)} for _ in ITERATIONS]
    history = make_history(ITERATIONS, weights)
    predictor = LinePredictor(chunk_elements=chunk)
    forecast = predictor.forecast(history, Target(1030, 1030.0, 1.0))
    live: list[int] = []
    total = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for _, _, values in predictor.predict(history, forecast):
            total += values.numel()
    for event in profile.events() or []:
        live.append(event.cpu_memory_usage)
    assert total == 40 * chunk
    assert max(live) <= 4 * chunk * 4
    assert history.largest_piece == chunk


TARGET = Target(1030, 1030.0, 1.0)


def setting_of(forecast: Forecast) -> Setting:
    chosen = forecast.settings
    return Setting(chosen["window_iterations"], chosen["gain"] * 30, chosen["direction"])


def test_the_setting_is_the_one_of_the_lowest_cautious_expectation(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    forecast = LinePredictor().forecast(history, TARGET)
    context = context_of(TARGET, history.entries, straightness=1.0)
    considered = prior_settings(context, windows(history.entries))
    best, expected = Calibration().best(context, considered, CAUTION_DEVIATIONS)
    assert setting_of(forecast) == best
    assert forecast.expected_end_cost_iterations == expected.end_cost_iterations
    assert forecast.settings["expected_deviation_iterations"] == expected.deviation_iterations
    assert Context(**forecast.settings["context"]) == context


def test_measured_lags_change_the_setting_and_survive(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    predictor = LinePredictor()
    before = predictor.forecast(history, TARGET)
    for _ in range(3):  # what it liked best did not come ahead, three times
        settings = before.settings
        predictor.record({"settings": settings, "lag_iterations": 60.0, "standard_error_iterations": 5.0})
    after = predictor.forecast(history, TARGET)
    assert setting_of(after).reach_iterations < setting_of(before).reach_iterations
    successor = LinePredictor()
    successor.load_state_dict(predictor.state_dict())
    assert successor.forecast(history, TARGET) == after


def test_a_lag_of_a_part_of_the_state_is_that_share_of_the_whole_one(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    settings = LinePredictor().forecast(history, TARGET).settings
    whole, part = LinePredictor(), LinePredictor()
    whole.record({"settings": settings, "lag_iterations": 60.0, "standard_error_iterations": 8.0})
    settings = {**settings, "lost_share": 0.25}
    part.record({"settings": settings, "lag_iterations": 15.0, "standard_error_iterations": 2.0})
    assert part.forecast(history, TARGET) == whole.forecast(history, TARGET)


def test_outcomes_without_a_lag_change_nothing(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    predictor = LinePredictor()
    before = predictor.forecast(history, TARGET)
    predictor.record({"outcome": "kept", "settings": before.settings, "watch": {"status": "passed"}})
    predictor.record({"outcome": "rolled_back", "settings": {}, "lag_iterations": 10.0})
    assert predictor.forecast(history, TARGET) == before


def test_what_began_at_the_line_s_value_is_no_measurement(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    predictor = LinePredictor()
    before = predictor.forecast(history, TARGET)
    settings = {**before.settings, "base": 1.0}  # as version 0.1.0 wrote it
    predictor.record({"settings": settings, "lag_iterations": 60.0, "standard_error_iterations": 5.0})
    assert predictor.forecast(history, TARGET) == before


def test_it_says_where_recomputing_is_expected_to_be_cheaper(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    predictor = LinePredictor()
    for _ in range(20):  # whatever it chooses costs more than recomputing
        forecast = predictor.forecast(history, TARGET)
        predictor.record(
            {"settings": forecast.settings, "lag_iterations": 60.0, "standard_error_iterations": 0.0},
        )
    assert predictor.forecast(history, TARGET).expected_end_cost_iterations > 30


def test_given_settings_are_taken(make_history: MakeHistory) -> None:
    history = make_history(ITERATIONS, straight(ITERATIONS))
    given_ones = LinePredictor(150, 1.2).forecast(history, Target(1030, 1030.0, 1.0)).settings
    assert (given_ones["window_iterations"], given_ones["gain"]) == (150, 1.2)
    assert given_ones["used_iterations"] == [850, 900, 950, 1000]


@pytest.mark.parametrize(
    "bad", [{"window_iterations": 1}, {"gain": -0.1}, {"gain": math.nan}, {"chunk_elements": 0}], ids=str
)
def test_bad_settings_are_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        LinePredictor(**bad)


def test_what_was_learned_survives() -> None:
    predictor, successor = LinePredictor(), LinePredictor()
    for number in range(MAX_OUTCOMES + 3):
        predictor.record({"recovery": number, "lag_iterations": 1.5})
    successor.load_state_dict(predictor.state_dict())
    outcomes = successor.state_dict()["outcomes"]
    assert [outcome["recovery"] for outcome in outcomes] == list(range(3, MAX_OUTCOMES + 3))
    outcomes.clear()
    assert len(successor.state_dict()["outcomes"]) == MAX_OUTCOMES


def test_learned_state_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2"):
        LinePredictor().load_state_dict({"predictor": "line", "version": 2, "outcomes": []})
    with pytest.raises(ValueError, match="plain JSON"):
        LinePredictor().record({"tensor": torch.ones(1)})
