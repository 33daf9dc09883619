"""What failures go back to by a plan, where windows are replayed."""

import math
from dataclasses import replace
from typing import Any

import pytest

from cpsr.journal import FailureScope
from cpsr.planner.inputs import FailureClass, Limits, MemoryTier, PlannerInputs
from cpsr.planner.plan import Plan
from cpsr.planner.planning import make_plan
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


def back_to(plan: Plan, scope: str) -> tuple[Any, Any]:
    """What a failure of a class goes back to, and the iterations that it loses."""
    found = plan.explanation["classes"][scope]
    return found["back_to"], found["loss_iterations"]


@pytest.mark.parametrize("length", [1, 4, 30])
def test_a_window_costs_one_and_a_half_of_its_length(length: int) -> None:
    plan = make_plan(windowed(length), Limits(100, 100_000), recovery_mode="exact")
    assert plan.memory_interval_iterations == length
    assert back_to(plan, "process") == ("window", pytest.approx(1.5 * length, rel=0.02))
    disk = "disk", pytest.approx(plan.interval_iterations / 2 + 5.0 / SECONDS, rel=0.02)
    assert back_to(plan, "machine") == back_to(plan, "everything") == disk


def test_a_window_that_is_longer_than_the_way_to_the_disk_is_not_gone_back_to() -> None:
    plan = make_plan(windowed(5000), Limits(100, 100), recovery_mode="exact")
    assert back_to(plan, "process")[0] == "disk"


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
    assert back_to(plan, "machine") == ("window", pytest.approx(walked(8, transfer), rel=0.1))


def test_what_goes_back_to_the_disk_is_predicted_where_the_plan_predicts() -> None:
    plan = make_plan(windowed(8, recovery=end_cost(-500.0, 0.01)), Limits(10, 500, 500))
    assert plan.mode == "predict"
    assert [back_to(plan, scope)[0] for scope in ("process", "everything")] == ["window", "predicted"]


@pytest.mark.parametrize("window", [True, False])
def test_mode_predict_goes_back_to_no_memory(window: bool) -> None:
    """As a restart, which predicts from the disk before it takes what is in memory."""
    inputs = windowed(8, 1.0, recovery=end_cost(-500.0, 0.01))
    inputs = replace(inputs, memory=MemoryTier(0.0, 8, 1.0, window=window))
    plan = make_plan(inputs, Limits(10, 500, 500), recovery_mode="predict")
    alone = make_plan(replace(inputs, memory=None), Limits(plan.interval_iterations, plan.interval_iterations))
    for scope in SHARES:
        assert back_to(plan, scope) == back_to(alone, scope)
        assert back_to(plan, scope)[0] == "predicted"
    assert plan.memory_interval_iterations == 8


def test_nothing_is_predicted_where_no_life_lasts_until_a_checkpoint_is_durable() -> None:
    frequent = job(1e-5, recovery=end_cost(0.0, 0.1), persist_seconds=100.0)
    place, iterations = back_to(make_plan(frequent, Limits(200, 500, 500), recovery_mode="predict"), "everything")
    assert place == "disk"
    assert math.isfinite(iterations)
