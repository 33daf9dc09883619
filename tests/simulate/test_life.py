import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.simulate.life import Reach, reach
from cpsr.simulate.system import Checkpoints


def one(checkpoints: Checkpoints, start: float, durable: float, seconds: float) -> Reach:
    due = checkpoints.interval_iterations
    first = (start // due + 1) * due
    arrays = (numpy.array([value]) for value in (start, durable, first, seconds))
    return reach(checkpoints, 2.0, *arrays)


def step_by_step(checkpoints: Checkpoints, start: int, durable: int, seconds: float) -> tuple[float, float]:
    """Position and newest durable checkpoint, iteration by iteration: what `reach` says in closed form."""
    clock, position = 0.0, start
    durable_at: list[tuple[float, int]] = []
    while True:
        if clock + 2.0 > seconds:
            break
        clock, position = clock + 2.0, position + 1
        if position % checkpoints.interval_iterations:
            continue
        busy = [at for at, _ in durable_at if at > clock]
        if len(busy) >= checkpoints.slots:
            if checkpoints.contention == "skip":
                continue
            clock = sorted(busy)[-checkpoints.slots]
        clock += checkpoints.stall_seconds
        durable_at.append((clock + checkpoints.persist_seconds, position))
    partial = min(max(seconds - clock, 0.0) / 2.0, 1.0)
    return position + partial, max([durable, *(at for when, at in durable_at if when <= seconds)])


def test_by_hand() -> None:
    # 10 iterations of 2 s, 3 s of stall, durable 5 s later: they begin at 20 and 43 s, and are durable at 28 and 51 s.
    checkpoints = Checkpoints(10, 3.0, 5.0)
    assert one(checkpoints, 0, 0, 21.0).position_iterations == 10
    assert one(checkpoints, 0, 0, 27.0).durable_iterations == 0
    assert one(checkpoints, 0, 0, 29.0).durable_iterations == 10
    at_50 = one(checkpoints, 0, 0, 50.0)
    assert (at_50.position_iterations.item(), at_50.durable_iterations.item()) == (22, 10)
    assert (at_50.trained_seconds.item(), at_50.stalled_seconds.item()) == (44, 6)


def test_the_first_checkpoint_is_begun_where_it_is_due() -> None:
    checkpoints = Checkpoints(10, 0.0)
    start, durable, first = (numpy.array([value]) for value in (7.0, 0.0, 40.0))
    found = [reach(checkpoints, 2.0, start, durable, first, numpy.array([seconds])) for seconds in (65.9, 66.1, 86.1)]
    assert [reached.durable_iterations.item() for reached in found] == [0, 40, 50]


@settings(max_examples=300, deadline=None)
@given(
    interval=st.integers(1, 12),
    # Quarters and odd eighths: no two events fall on one instant, where the order would be anybody's.
    stall=st.integers(0, 40).map(lambda n: n / 4 + 0.015625),
    persist=st.integers(0, 400).map(lambda n: n / 4 + 0.0078125),
    slots=st.integers(1, 4),
    start=st.integers(0, 30),
    seconds=st.integers(0, 2000).map(lambda n: n / 4 + 0.125),
)
def test_closed_form_is_the_step_by_step_one(
    interval: int, stall: float, persist: float, slots: int, start: int, seconds: float
) -> None:
    durable = start - start % interval
    for contention in ("wait", "skip") if slots == 1 else ("wait",):
        checkpoints = Checkpoints(interval, stall, persist, slots, contention)
        position, newest = step_by_step(checkpoints, start, durable, seconds)
        found = one(checkpoints, start, durable, seconds)
        assert found.position_iterations == pytest.approx(position, abs=1e-6)
        assert found.durable_iterations == newest
        assert found.trained_seconds + found.stalled_seconds == pytest.approx(seconds)
        assert found.trained_seconds == pytest.approx((found.position_iterations - start) * 2.0, abs=1e-6)
