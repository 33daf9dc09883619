"""When hints are checkpoints, by a clock that the tests set."""

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.hints.pace import Pace, Round, rounds_of
from cpsr.hints.source import read_source
from tests.hints.programs import module_of

COST = 0.04
NESTED = Round(1, (Round(2, (1,)), 2))  # an outer loop: an inner one with hint 1, then hint 2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def nested(outer: int, inner: int, step: float, end: float) -> Iterator[tuple[str, int, float]]:
    """What a run of the two loops comes to: the begin of a loop, or a hint and the seconds before it."""
    yield "loop", 1, outer
    for _ in range(outer):
        yield "loop", 2, inner
        for _ in range(inner):
            yield "hint", 1, step
        yield "hint", 2, end


def run(pace: Pace, clock: Clock, events: Iterator[tuple[str, int, float]], costs: Iterator[float]) -> list[int]:
    """Let a program pass; the hints that were checkpoints."""
    taken = []
    for kind, number, value in events:
        if kind == "loop":
            pace.entered(number, int(value))
            continue
        clock.now += value
        if pace.due(number):
            cost = next(costs)
            clock.now += cost
            pace.took(number, cost, checkpoint=True)
            taken.append(number)
    return taken


@pytest.mark.parametrize("allowance", [0.05, 0.1, 0.15])
@pytest.mark.parametrize("rounds", [[], [NESTED]])
def test_the_allowance_is_used_and_kept(allowance: float, rounds: list[Round]) -> None:
    clock = Clock()
    pace = Pace(allowance, rounds, 2, COST, clock)
    taken = run(pace, clock, nested(5, 50, 0.02, 0.02), itertools.repeat(COST))
    own = pace.own_seconds()
    assert own == pytest.approx(5.1)
    assert pace.spent_seconds <= allowance * own
    assert len(taken) >= int(allowance * own / COST) - 3
    gaps = [after - before for before, after in itertools.pairwise([0.0, *pace.taken_seconds, own])]
    assert max(gaps) <= 3.5 * COST / allowance


@given(
    st.floats(0.01, 1.0),
    st.lists(st.floats(0.001, 0.5), min_size=1, max_size=4),
    st.tuples(st.integers(1, 6), st.integers(1, 30)),
    st.booleans(),
)
def test_checkpoints_never_take_more_than_the_allowance_and_one_surprise(
    allowance: float, costs: list[float], loops: tuple[int, int], placed: bool
) -> None:
    clock = Clock()
    pace = Pace(allowance, [NESTED] if placed else [], 2, costs[0], clock)
    run(pace, clock, nested(*loops, 0.02, 0.1), itertools.cycle(costs))
    # The next cost is taken to be at most twice the largest of the last ones; it can be larger.
    assert pace.spent_seconds <= allowance * pace.own_seconds() + max(0.0, max(costs) - 2 * min(costs)) + 1e-9


@pytest.mark.parametrize("allowance", [0.05, 0.1])
def test_a_long_call_repeats_little_more_than_at_even_distances(allowance: float) -> None:
    """Though one checkpoint takes several times as long as another, as on a disk that others use too."""
    drawn = random.Random(1)
    clock = Clock()
    pace = Pace(allowance, [], 2, COST, clock)
    costs = (COST * drawn.lognormvariate(0.0, 0.5) for _ in itertools.count())
    taken = run(pace, clock, nested(10, 2000, 0.02, 0.02), costs)
    own = pace.own_seconds()
    assert pace.spent_seconds <= allowance * own
    even = own**2 / (allowance * own / (pace.spent_seconds / len(taken)) + 1)
    lost = sum((after - before) ** 2 for before, after in itertools.pairwise([0.0, *pace.taken_seconds, own]))
    assert lost <= 1.15 * even


@pytest.mark.parametrize("costs", [(0.2, 0.02), (0.02, 0.2), (0.04, 0.04)])
@pytest.mark.parametrize("loops", [(60, 10, 0.1, 0.1), (5, 50, 0.02, 0.5), (300, 2, 0.1, 0.3)])
@pytest.mark.parametrize("allowance", [0.05, 0.15])
def test_the_placement_is_used_where_it_repeats_less(
    costs: tuple[float, float], loops: tuple[int, int, float, float], allowance: float
) -> None:
    """With costs that differ from hint to hint; the first one of a hint may surprise, and keeps others away."""
    lost = []
    for rounds in ([], [NESTED]):
        clock = Clock()
        pace = Pace(allowance, rounds, 2, 0.02, clock)
        for kind, number, value in nested(*loops):
            if kind == "loop":
                pace.entered(number, int(value))
                continue
            clock.now += value
            if pace.due(number):
                clock.now += costs[number - 1]
                pace.took(number, costs[number - 1], checkpoint=True)
        own = pace.own_seconds()
        assert pace.spent_seconds <= allowance * own + 0.16
        lost.append(sum((after - before) ** 2 for before, after in itertools.pairwise([0.0, *pace.taken_seconds, own])))
    assert lost[1] <= 1.05 * lost[0] + (max(costs) / allowance) ** 2


def test_an_infinite_allowance_makes_every_hint_one() -> None:
    clock = Clock()
    pace = Pace(math.inf, [NESTED], 2, COST, clock)
    assert len(run(pace, clock, nested(2, 3, 0.1, 0.1), itertools.repeat(COST))) == 8


@pytest.mark.parametrize("lengths", [(0, 0), (0, 5), (5, 0)])
def test_loops_of_unknown_length_are_paced_by_the_allowance_alone(lengths: tuple[int, int]) -> None:
    clock = Clock()
    pace = Pace(0.05, [Round(1, (Round(2, (1,)),))], 1, COST, clock)
    events = (
        (kind, number, lengths[number - 1] if kind == "loop" else value)
        for kind, number, value in nested(40, 5, 0.1, 0.1)
        if (kind, number) != ("hint", 2)
    )
    taken = run(pace, clock, events, itertools.repeat(COST))
    assert taken
    assert pace.spent_seconds <= 0.05 * pace.own_seconds()


def test_the_first_one_waits_for_what_it_may_take() -> None:
    clock = Clock()
    pace = Pace(0.1, [], 1, 0.25, clock)
    assert [round(at, 3) for at in _single(pace, clock, 0.5, 100)][:2] == [5.0, 5.5]


def test_a_call_that_goes_on_knows_what_checkpoints_cost() -> None:
    clock = Clock()
    before = Pace(0.1, [], 1, 0.25, clock)
    _single(before, clock, 0.5, 20)
    after = Pace(0.1, [], 1, 50.0, clock)
    after.learn(before.costs())
    assert _single(after, clock, 0.5, 100)[0] == pytest.approx(0.5)


def _single(pace: Pace, clock: Clock, step: float, count: int) -> list[float]:
    run(pace, clock, (("hint", 1, step) for _ in range(count)), itertools.repeat(0.025))
    return pace.taken_seconds


def test_loops_that_come_to_the_same_hints_in_every_repetition(tmp_path: Path) -> None:
    text = """
def f(n, xs):
    hint()
    for i in range(n):
        for x in xs:
            if x:
                xs[x] = 1
            hint()
        hint()
        while i:
            i -= 1
    for i in range(n):
        if i:
            hint()
    for i in range(n):
        hint()
        if i:
            break
    while n:
        for i in range(n):
            hint()
        n -= 1
"""
    source = read_source(module_of(tmp_path, text).f)
    assert rounds_of(source) == [Round(1, (Round(2, (2,)), 3)), Round(5, (6,))]
    assert list(Round(1, (Round(2, (2,)), 3)).hints()) == [2, 3]
