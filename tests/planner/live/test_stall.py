import pytest

from cpsr.planner.live.stall import StallMeter


def metered(calm: int, under_way: list[float], blocked_seconds: float = 0.01) -> float:
    meter = StallMeter()
    for _ in range(calm):
        meter.step(0.1)
    meter.begun()
    for seconds in under_way:
        meter.step(seconds)
    return meter.durable(blocked_seconds)


def test_slower_steps_while_it_is_written_are_its_cost() -> None:
    assert metered(20, [0.15, 0.13, 0.1]) == pytest.approx(0.08)


def test_snapshots_to_memory_meanwhile_are_not_its_cost() -> None:
    meter = StallMeter()
    for _ in range(20):
        meter.snapshot(0.02)
        meter.step(0.12)
    meter.begun()
    for _ in range(5):
        meter.snapshot(0.02)
        meter.step(0.13)
    assert meter.durable(0.0) == pytest.approx(0.05)


def test_it_costs_at_least_what_training_waited() -> None:
    assert metered(20, [0.1, 0.09]) == 0.01


@pytest.mark.parametrize(("calm", "under_way"), [(4, [9.0]), (20, [])])
def test_without_a_pace_or_a_step_it_is_what_training_waited(calm: int, under_way: list[float]) -> None:
    assert metered(calm, under_way) == 0.01


def test_steps_under_a_checkpoint_are_not_the_pace() -> None:
    meter = StallMeter()
    for _ in range(3):
        for _ in range(10):
            meter.step(0.1)
        meter.begun()
        for _ in range(100):
            meter.step(0.2)
        assert meter.durable(0.0) == pytest.approx(10.0)
