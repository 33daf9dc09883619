"""Which hints are checkpoints: the placement against brute force, and the allowance by a clock that the tests set."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpsr.hints.placement import Pace, place
from cpsr.hints.source import FunctionSource, read_source
from tests.hints.programs import module_of

CLOSE = 1e-9
SECONDS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 5.0]), st.floats(0.1, 20.0))
MTBF = st.sampled_from([5.0, 50.0, 500.0])


def recovery(at: Sequence[float], seconds: float, mtbf: float) -> float:
    """The paper's formula, with checkpoints at these times."""
    blocks = (after - before for before, after in itertools.pairwise([0.0, *at, seconds]))
    return sum(block / 2 * math.expm1(block / mtbf) for block in blocks)


@given(st.lists(SECONDS, min_size=1, max_size=9).filter(any), st.integers(0, 9), MTBF)
def test_no_other_hints_are_better(seconds: list[float], count: int, mtbf: float) -> None:
    *ends, end = itertools.accumulate(seconds)
    chosen = [ends[one] for one in place([*ends, end], end, count, mtbf)]
    others = [at for size in range(min(count, len(ends)) + 1) for at in itertools.combinations(ends, size)]
    least = min(recovery(at, end, mtbf) for at in others)
    assert recovery(chosen, end, mtbf) == pytest.approx(least, rel=CLOSE, abs=CLOSE)
    assert len(chosen) <= count
    assert chosen == sorted(chosen)


COST = 0.04
Arrival = tuple[int, float, list[tuple[int, int | None]]]  # hint, seconds before it, loops around it


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> FunctionSource:
    """Two loops: an inner one with hint 1, then hint 2."""
    text = "def f(n):\n    for i in range(n):\n        for j in range(n):\n            hint()\n        hint()\n"
    return read_source(module_of(tmp_path_factory.mktemp("program"), text).f)


def nested(outer: int, inner: int, step: float, end: float, *, known: bool) -> Iterator[Arrival]:
    lengths = (outer, inner) if known else (None, None)
    for i in range(1, outer + 1):
        for j in range(1, inner + 1):
            yield 1, step, [(i, lengths[0]), (j, lengths[1])]
        yield 2, end, [(i, lengths[0])]


def run(pace: Pace, clock: Clock, arrivals: Iterator[Arrival], costs: Iterator[float]) -> list[float]:
    """Let a program pass; its own seconds at each checkpoint."""
    taken = []
    for number, seconds, loops in arrivals:
        clock.now += seconds
        if pace.due(number, loops):
            cost = next(costs)
            clock.now += cost
            pace.took(cost, checkpoint=True)
            taken.append(pace.own_seconds())
    return taken


@pytest.mark.parametrize("allowance", [0.05, 0.1, 0.15])
@pytest.mark.parametrize("known", [False, True])
def test_the_allowance_is_used_and_kept(source: FunctionSource, allowance: float, known: bool) -> None:
    clock = Clock()
    pace = Pace(source, allowance, COST, clock)
    taken = run(pace, clock, nested(5, 50, 0.02, 0.02, known=known), itertools.repeat(COST))
    own = pace.own_seconds()
    assert own == pytest.approx(5.1)
    assert pace.spent_seconds <= allowance * own
    assert len(taken) >= int(allowance * own / COST) - 3
    gaps = [after - before for before, after in itertools.pairwise([0.0, *taken, own])]
    assert max(gaps) <= 3.5 * COST / allowance


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    allowance=st.floats(0.01, 1.0),
    costs=st.lists(st.floats(0.001, 0.5), min_size=1, max_size=4),
    loops=st.tuples(st.integers(1, 6), st.integers(1, 30)),
    known=st.booleans(),
)
def test_checkpoints_never_take_more_than_the_allowance_and_one_surprise(
    source: FunctionSource, allowance: float, costs: list[float], loops: tuple[int, int], known: bool
) -> None:
    clock = Clock()
    pace = Pace(source, allowance, costs[0], clock)
    run(pace, clock, nested(*loops, 0.02, 0.1, known=known), itertools.cycle(costs))
    assert pace.spent_seconds <= allowance * pace.own_seconds() + max(costs)


def test_every_hint_is_a_checkpoint_without_a_limit_and_a_call_that_goes_on_knows_the_costs(
    source: FunctionSource,
) -> None:
    clock = Clock()
    pace = Pace(source, math.inf, 0.0, clock)
    assert len(run(pace, clock, nested(2, 3, 0.1, 0.1, known=True), itertools.repeat(COST))) == 8
    later = Pace(source, 0.1, 0.0, clock)
    later.learn(pace.recent_seconds())
    clock.now += 2 * COST / 0.1 - 0.01
    assert not later.due(1, [(1, 2), (1, 3)])
    clock.now += 0.02
    assert later.due(1, [(1, 2), (2, 3)])


def test_a_plan_is_left_where_its_loop_begins_again(source: FunctionSource) -> None:
    clock = Clock()
    pace = Pace(source, 0.1, COST, clock)
    for _ in range(3):
        taken = run(pace, clock, nested(4, 50, 0.02, 0.02, known=True), itertools.repeat(COST))
        assert len(taken) >= 5
