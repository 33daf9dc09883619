"""The ways back from a failure: one table for plans and restarts."""

import json
import math
import random
import warnings
from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.journal import FailureScope
from cpsr.planner.cost import Costs
from cpsr.planner.inputs import FailureClass, Limits, MemoryTier, PlannerInputs
from cpsr.planner.plan import Plan
from cpsr.planner.planning import WAYS, make_plan, ways_of
from cpsr.planner.ways_back import Prices, Way, in_order
from tests.planner.jobs import end_cost, job

SECONDS = 0.6
SHARES: dict[FailureScope, FailureClass] = {
    "process": FailureClass(0.3, 0.3),
    "machine": FailureClass(0.6, 0.6),
    "everything": FailureClass(0.1, 0.1),
}


def windowed(length: int = 8, replica_seconds: float | None = None, **fields: object) -> PlannerInputs:
    memory = MemoryTier(0.0, length, replica_seconds, window=True)
    return replace(job(), classes=SHARES, memory=memory, **fields)  # type: ignore[arg-type]


def ways_in(plan: Plan, scope: str) -> dict[str, float]:
    """Iterations of each way, the first one first."""
    return {way["way"]: way["loss_iterations"] for way in plan.explanation["classes"][scope]["ways"]}


@pytest.mark.parametrize("length", [1, 4, 30])
def test_a_window_costs_one_and_a_half_of_its_length(length: int) -> None:
    plan = make_plan(windowed(length), Limits(100, 100_000), recovery_mode="exact")
    assert plan.memory_interval_iterations == length
    process = ways_in(plan, "process")
    assert next(iter(process)) == "window"
    assert process["window"] == pytest.approx(1.5 * length, rel=0.02)
    assert process["disk"] == pytest.approx(plan.interval_iterations / 2 + 5.0 / SECONDS, rel=0.02)
    assert list(ways_in(plan, "machine")) == list(ways_in(plan, "everything")) == ["disk"]
    assert plan.explanation["classes"]["process"]["back_to"] == "window"


def test_a_job_whose_checkpoints_never_become_durable_cannot_predict() -> None:
    """An interval that no life reaches, as `cpsr bench stall` sets: the distance from a checkpoint has no mean."""
    predicting = job(recovery=end_cost(1.0, 0.1))
    costs = Costs(predicting)
    for interval, possible in ((100, True), (2**40, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = {way.name for way in ways_of(predicting, interval, None, "everything")}
        assert math.isfinite(costs.horizon_iterations(numpy.array([float(interval)]), "predict")[0]) == possible
        assert ("predicted" in found) == possible


def walked(length: int, transfer: float) -> float:
    """Mean iterations since the begin of the newest window that another machine has, iteration by iteration."""
    sent, free, held, lost = list[tuple[float, int]](), 0.0, 0, list[float]()
    for now in range(60 * length):
        if now and now % length == 0 and now >= free:  # a window has ended, and nothing is being sent
            free = now + transfer
            sent.append((free, now - length))
        held = max((begin for whole, begin in sent if whole <= now), default=held)
        if now > 30 * length:
            lost.append(now + 0.5 - held)
    return sum(lost) / len(lost)


@pytest.mark.parametrize("transfer", [1.0, 8.0, 15.0, 16.0, 20.0])
def test_a_window_on_another_machine_is_older_by_its_transfer(transfer: float) -> None:
    plan = make_plan(windowed(8, transfer * SECONDS), Limits(1000, 100_000), recovery_mode="exact")
    assert ways_in(plan, "machine")["window"] == pytest.approx(walked(8, transfer), rel=0.1)


def test_a_window_is_replaced_by_a_prediction_only_where_that_is_surely_cheaper() -> None:
    sure = replace(end_cost(-500.0, 0.01), prior_covariance=((1.0, 0.0, 0.0), (0.0, 1e-6, 0.0), (0.0, 0.0, 1e-6)))
    unsure = replace(sure, prior_covariance=((1e6, 0.0, 0.0), (0.0, 1e-6, 0.0), (0.0, 0.0, 1e-6)))
    firsts = []
    for curve in (sure, unsure):
        plan = make_plan(windowed(8, recovery=curve), Limits(10, 500, 500))
        assert plan.mode == "predict"
        firsts.append([next(iter(ways_in(plan, scope))) for scope in ("process", "everything")])
    assert firsts == [["predicted", "predicted"], ["window", "predicted"]]


@st.composite
def some_ways(draw: st.DrawFn) -> list[Way]:
    scope = draw(st.sampled_from(list(WAYS)))
    seconds = st.floats(-100, 100)
    return [
        Way(name, draw(seconds), draw(st.floats(0, 50)) if name == "predicted" else 0.0, draw(st.floats(0, 5)))
        for name in WAYS[scope]
        if name == "disk" or draw(st.booleans())
    ]


@given(some_ways(), st.booleans(), st.randoms())
@settings(max_examples=500)
def test_the_first_way_is_the_cheapest_unless_it_would_be_a_doubtful_prediction(
    ways: list[Way], predicts: bool, chance: random.Random
) -> None:
    first, *others = in_order(ways, predicts=predicts)
    assert sorted([first, *others], key=repr) == sorted(ways, key=repr), "no way is lost"
    by_name = {way.name: way for way in ways}
    if first.name == "predicted":
        assert predicts
        assert not {"memory", "replica"} & by_name.keys()
        if "window" in by_name and by_name["window"].seconds <= by_name["disk"].seconds:
            assert first.seconds + first.deviation_seconds < by_name["window"].seconds
    elif first.name == "window":
        assert first.seconds <= by_name["disk"].seconds
        doubtful = by_name.get("predicted")
        assert doubtful is None or not predicts or doubtful.safe_seconds >= first.seconds
    elif first.name == "disk":
        assert by_name.keys() <= {"disk", "window", "predicted"}


def test_what_a_plan_leaves_in_a_checkpoint_prices_a_restart() -> None:
    inputs = windowed(8, recovery=end_cost(2.0, 0.5, 0.1), predict_seconds=3.0, lost_share=0.5)
    prices = Prices.of_job(replace(inputs, load_seconds={"memory": 1.0}), 40)
    assert prices is not None
    assert Prices.of_tree(json.loads(json.dumps(prices.to_tree()))) == prices
    assert prices.repeated("window", 10) == Way("window", 6.0, 0.0, 1.0)
    assert prices.repeated("disk", 10).load_seconds == 0.0, "not measured"
    predicted = prices.predicted(20, share=1.0)
    assert predicted is not None
    assert predicted.loss_seconds == pytest.approx(2 * SECONDS * (2.0 + 0.5 * 20 + 0.1 * 40) + 3.0)
    half = prices.predicted(20, share=0.5)
    assert half is not None
    assert half.deviation_seconds == pytest.approx(predicted.deviation_seconds / 2)
