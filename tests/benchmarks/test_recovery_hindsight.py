"""What hindsight chooses: by the failure itself, and by all the others."""

from dataclasses import replace

import pytest

from cpsr.benchmarks.recovery.grid import Point
from cpsr.benchmarks.recovery.hindsight import chosen_outcomes
from cpsr.benchmarks.recovery.measure import Outcome
from cpsr.benchmarks.recovery.methods import ARMS, CELL_BEST, HINDSIGHT, find_methods, measured_methods

FIRST, SECOND = list(ARMS)[:2]


def outcomes(lags: dict[str, dict[int, float | None]], other: float | None = 40.0) -> list[Outcome]:
    """Of each arm at each checkpoint; arms without numbers cost `other`."""
    points = [Point(50, 0.5, at, at + 40) for at in next(iter(lags.values()))]
    return [
        Outcome(arm, 0, point, True, "", lags.get(arm, {}).get(point.checkpoint, other))
        for point in points
        for arm in ARMS
    ]


def chosen(found: list[Outcome], method: str) -> dict[int, tuple[str, float | None]]:
    return {
        one.point.checkpoint: ("" if one.settings is None else one.settings["arm"], one.lag_iterations)
        for one in found
        if one.method == method
    }


def test_hindsight_takes_the_best_at_each_failure_and_the_cell_the_best_of_the_others() -> None:
    found = chosen_outcomes(
        outcomes({FIRST: {500: 0.0, 550: 20.0, 600: 20.0}, SECOND: {500: 30.0, 550: 10.0, 600: 12.0}})
    )
    assert chosen(found, HINDSIGHT) == {500: (FIRST, 0.0), 550: (SECOND, 10.0), 600: (SECOND, 12.0)}
    # At 500 the others say the second arm (11 against 20); at 550 the first (10 against 21), as at 600 (10, 20).
    assert chosen(found, CELL_BEST) == {500: (SECOND, 30.0), 550: (FIRST, 20.0), 600: (FIRST, 20.0)}


def test_failures_after_the_same_checkpoint_do_not_judge_each_other() -> None:
    found = [
        Outcome(arm, 0, Point(50, 0.5, at, failure), True, "", lag)
        for at, failure, lags in ((500, 535, (0.0, 9.0)), (500, 545, (0.0, 9.0)), (550, 590, (9.0, 0.0)))
        for arm, lag in zip(ARMS, (*lags, *(40.0,) * (len(ARMS) - 2)), strict=True)
    ]
    of_cell = [one for one in chosen_outcomes(found) if one.method == CELL_BEST]
    assert [one.lag_iterations for one in of_cell] == [9.0, 9.0, 9.0]


def test_an_arm_without_a_lag_is_not_chosen_while_another_has_one() -> None:
    lags: dict[str, dict[int, float | None]] = {FIRST: {500: None, 550: None}, SECOND: {500: 39.0, 550: 39.0}}
    found = chosen_outcomes(outcomes(lags))
    for method in (HINDSIGHT, CELL_BEST):
        assert chosen(found, method) == {500: (SECOND, 39.0), 550: (SECOND, 39.0)}


def test_one_failure_leaves_nothing_to_choose_by() -> None:
    found = chosen_outcomes(outcomes({FIRST: {500: 3.0}}))
    assert chosen(found, HINDSIGHT) == {500: (FIRST, 3.0)}
    assert chosen(found, CELL_BEST) == {500: ("", None)}


def test_cells_choose_apart() -> None:
    early = outcomes({FIRST: {500: 0.0, 550: 0.0}})
    late = [
        replace(one, point=Point(50, 0.75, one.point.checkpoint + 200, one.point.failure + 200))
        for one in outcomes({SECOND: {500: 0.0, 550: 0.0}})
    ]
    assert set(chosen(chosen_outcomes([*early, *late]), CELL_BEST).values()) == {(FIRST, 0.0), (SECOND, 0.0)}


@pytest.mark.parametrize("name", [HINDSIGHT, CELL_BEST])
def test_the_arms_are_measured_for_it(name: str) -> None:
    assert measured_methods(["recompute", name, "line"]) == ("recompute", *ARMS, "line")
    assert name in find_methods(None)
    assert not set(ARMS) & set(find_methods(None))
    assert find_methods([FIRST]) == (FIRST,)
