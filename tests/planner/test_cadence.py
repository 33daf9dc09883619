"""Who saves at which step, for any multiples: all ranks at the longest, and exactly those due between."""

from hypothesis import given
from hypothesis import strategies as st

from cpsr.planner.cadence import Cadence, Savers
from cpsr.planner.plan import Plan

EXPONENTS = st.lists(st.integers(0, 4), min_size=1, max_size=5)


def plan_of(base: int, exponents: list[int]) -> Plan:
    return Plan(base, "cpsr", {}, "predict", tuple(base * 2**exponent for exponent in exponents))


def saves(cadences: list[Cadence], plan: Plan, iterations: range) -> dict[int, list[Savers]]:
    """Iteration -> who saves, for each rank, of the iterations at which anything is due."""
    found: dict[int, list[Savers]] = {}
    for iteration in iterations:
        due = {cadence.is_due(plan, iteration) for cadence in cadences}
        assert len(due) == 1, "all ranks save at the same iterations"
        if due == {True}:
            found[iteration] = [cadence.take(plan, iteration) for cadence in cadences]
    return found


@given(EXPONENTS, st.integers(1, 7), st.integers(0, 1000))
def test_all_save_at_the_longest_and_exactly_those_due_between(exponents: list[int], base: int, started: int) -> None:
    plan, longest = plan_of(base, exponents), 2 ** max(exponents)
    cadences = [Cadence(rank, started) for rank in range(len(exponents))]
    steps = 2 * longest + 2
    found = saves(cadences, plan, range(started + 1, started + steps * base + 1))
    assert list(found) == [started + step * base for step in range(1, steps + 1)]
    for place, savers in enumerate(found.values()):  # the first is of all, and counts start there
        if place % longest == 0:
            assert set(savers) == {"all"}
        else:
            due = ["this" if place % 2**exponent == 0 else "others" for exponent in exponents]
            assert savers == due


@given(EXPONENTS, EXPONENTS, st.integers(1, 40), st.integers(1, 5), st.integers(1, 5))
def test_after_a_new_plan_all_save_no_later_than_by_the_longer_of_the_two(
    before: list[int], after: list[int], changed: int, base: int, other: int
) -> None:
    ranks = min(len(before), len(after))
    first, second = plan_of(base, before[:ranks]), plan_of(other, after[:ranks])
    cadences = [Cadence(rank, 0) for rank in range(ranks)]
    found = saves(cadences, first, range(1, changed + 1))
    found |= saves(cadences, second, range(changed + 1, changed + 33 * other + 1))
    for savers in found.values():
        assert ("all" in savers) == (set(savers) == {"all"})
    between = 0
    for savers in found.values():
        between = 0 if "all" in savers else between + 1
        assert between < max(first.largest_multiple, second.largest_multiple)


def test_with_one_interval_every_checkpoint_is_of_all_ranks() -> None:
    cadences = [Cadence(rank, 0) for rank in range(3)]
    found = saves(cadences, Plan(5, "cpsr", {}), range(1, 31))
    assert found == {iteration: ["all"] * 3 for iteration in range(5, 31, 5)}


def test_the_next_after_a_restart_is_of_all_ranks() -> None:
    plan, cadence = plan_of(2, [0, 3]), Cadence(0, 0)
    assert [cadence.take(plan, iteration) for iteration in (2, 4)] == ["all", "this"]
    cadence.restart(4)
    assert not cadence.is_due(plan, 5)
    assert [cadence.take(plan, iteration) for iteration in (6, 8)] == ["all", "this"]
