import time
from pathlib import Path

import pytest

from cpsr.journal import Journal, PlanOverride, override_plan
from cpsr.planner.inputs import Limits, PlannerInputs
from cpsr.planner.live.adoption import OverrideWatch, bounded, differs, overridden, pinned_plan
from cpsr.planner.plan import Plan, fixed_plan
from cpsr.planner.planning import make_plan

LIMITS = Limits(10, 500, 300, "the prior")


def override(low: int | None, high: int | None, seconds: float = 60.0) -> PlanOverride:
    return PlanOverride(
        interval_min_iterations=low,
        interval_max_iterations=high,
        reason="x",
        expires_unix_seconds=time.time() + seconds,
        id=3,
    )


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(50, 50, (50, 50)), (20, None, (20, 500)), (None, 90, (10, 90)), (2, 5, (10, 10)), (600, 900, (500, 500))],
)
def test_limits_are_narrowed_and_never_widened(low: int | None, high: int | None, expected: tuple[int, int]) -> None:
    limits = bounded(LIMITS, override(low, high))
    assert (limits.interval_min_iterations, limits.interval_max_iterations) == expected
    assert limits.predictable_interval_iterations == 300
    assert bounded(LIMITS, None) == LIMITS


def test_a_plan_says_what_it_was_made_under() -> None:
    pinned = override(50, 50)
    plan = make_plan(PlannerInputs(0.6, 0.2, 4.0, 1 / 7200), bounded(LIMITS, pinned))
    result = overridden(plan, pinned, LIMITS)
    assert (result.interval_iterations, result.origin) == (50, "override")
    assert result.explanation["override"]["without"] == {"interval_min_iterations": 10, "interval_max_iterations": 500}
    assert (result.explanation["override"]["id"], result.explanation["override"]["policy"]) == (3, "cpsr")
    assert overridden(plan, None, LIMITS) == plan
    bound = override(20, None)
    assert overridden(plan, bound, LIMITS).origin == "cpsr", "the rule has chosen within the bounds"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(12, 12, 12), (80, None, 80), (None, 20, 20), (10, 90, 50), (2, 2, 10), (2**31, None, 500)],
)
def test_a_fixed_interval_is_overridden_as_well(low: int | None, high: int | None, expected: int) -> None:
    plan = pinned_plan(fixed_plan(50), override(low, high), LIMITS)
    assert (plan.interval_iterations, plan.origin) == (expected, "override")
    assert plan.explanation["override"]["id"] == 3


def test_what_holds_is_the_newest_until_it_expires_or_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = OverrideWatch(tmp_path)
    assert watch.now() is None
    Journal.open(tmp_path / "journal.db").close()
    assert watch.now() is None
    override_plan(tmp_path, override(5, 5))
    override_plan(tmp_path, override(6, 6, seconds=30.0))
    current = watch.now()
    assert current is not None
    assert (current.id, current.interval_min_iterations) == (2, 6)
    override_plan(tmp_path, override(7, None))
    assert watch.now() is not None
    override_plan(tmp_path, override(6, 6, seconds=30.0))
    later = time.time() + 31.0
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: later)
        assert watch.now() is None, "those before do not come back, although they would hold"
    assert watch.now() is not None
    override_plan(tmp_path, override(None, None))
    assert watch.now() is None


def test_where_it_cannot_be_read_the_last_one_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal.open(tmp_path / "journal.db").close()
    override_plan(tmp_path, override(5, 5, seconds=60.0))
    watch = OverrideWatch(tmp_path)
    current = watch.now()
    for file in tmp_path.glob("commands.db*"):
        file.write_bytes(b"x" * 4096)
    assert current is not None
    assert [watch.now(), watch.now()] == [current, current]
    assert caplog.text.count("cannot be read") == 1
    later = time.time() + 61.0
    monkeypatch.setattr(time, "time", lambda: later)
    assert watch.now() is None


@pytest.mark.parametrize(
    ("before", "after", "worth"),
    [
        ((100, 3), (100, 4), False),
        ((100, 1), (100, 2), True),
        ((100, 10), (109, 12), False),
        ((100, 10), (111, 10), True),
        ((100, None), (100, 10), True),
        ((100, None), (100, None), False),
    ],
)
def test_small_changes_are_not_worth_a_plan(
    before: tuple[int, int | None], after: tuple[int, int | None], worth: bool
) -> None:
    plans = [Plan(interval, "cpsr", {}, memory_interval_iterations=every) for interval, every in (after, before)]
    assert differs(*plans) == worth
