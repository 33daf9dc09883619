"""Which hints are checkpoints: the placement against brute force, and the allowance by a clock that the tests set."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.hints.placement import LoopPosition, Pace, place

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
WRITE = 0.03  # seconds until a checkpoint is written
Arrival = tuple[float, list[LoopPosition]]  # seconds before a hint, and the loops around it


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def nested(outer: int, inner: int, step: float, end: float, *, known: bool) -> Iterator[Arrival]:
    """Two loops: a hint after each step of the inner one, and one at the end of each repetition of the outer one."""
    lengths = (outer, inner) if known else (None, None)
    for i in range(1, outer + 1):
        for j in range(1, inner + 1):
            yield step, [(1, i, lengths[0]), (2, j, lengths[1])]
        yield end, [(1, i, lengths[0])]


def run(pace: Pace, clock: Clock, arrivals: Iterator[Arrival], costs: Iterator[float]) -> list[float]:
    """Let a program pass; its own seconds at each checkpoint.

    It waits for a fifth of the cost. Writing the checkpoint keeps it from the processor for the rest.
    """
    taken: list[float] = []
    written_at, processor = math.inf, 0.0
    for number, (seconds, loops) in enumerate(arrivals):
        clock.now += seconds
        if clock.now >= written_at:
            clock.now += processor
            pace.written(processor, WRITE)
            written_at = math.inf
        if pace.due(loops):
            assert written_at == math.inf
            cost = next(costs)
            clock.now += 0.2 * cost
            pace.copied(0.2 * cost)
            taken.append(pace.own_seconds())
            assert len(taken) == 1 or taken[-1] > taken[-2]
            written_at, processor = clock.now + WRITE, 0.8 * cost
        elif not number:
            pace.looked(0.0, 0)
    if written_at < math.inf:
        clock.now += processor
        pace.written(processor, WRITE)
    return taken


def even_steps() -> Iterator[Arrival]:
    """The loop of the paper, with times that vary and a slow first step."""
    drawn = random.Random(1)
    first = 0.2
    for seconds, loops in nested(5, 200, 0.02, 0.3, known=True):
        yield first + seconds * drawn.uniform(0.8, 1.2), loops
        first = 0.0


def longer_steps() -> Iterator[Arrival]:
    return ((0.001 * i, [(1, i, 200)]) for i in range(1, 201))


def steps_that_grow_in_each_round() -> Iterator[Arrival]:
    for i, j in itertools.product(range(1, 7), range(1, 41)):
        yield 0.002 * j + (0.1 if j == 1 else 0), [(1, i, 6), (2, j, 40)]


def a_branch_with_a_hint() -> Iterator[Arrival]:
    for i in range(1, 401):
        yield 0.03, [(1, i, 400)]
        if i % 7 == 0:
            yield 0.15, [(1, i, 400)]


PROGRAMS = [even_steps, longer_steps, steps_that_grow_in_each_round, a_branch_with_a_hint]


@pytest.mark.parametrize("count", [4, 15, 40])
@pytest.mark.parametrize("program", PROGRAMS)
def test_checkpoints_are_where_one_who_knew_all_times_would_place_them(
    program: Callable[[], Iterator[Arrival]], count: int
) -> None:
    *at, end = itertools.accumulate(seconds for seconds, _ in program())
    cost = 0.1 * end / (count + 0.5)
    clock = Clock()
    pace = Pace(0.1, 1.2 * cost, clock)
    taken = run(pace, clock, program(), itertools.repeat(cost))
    assert pace.spent_seconds <= 0.1 * end
    assert len(taken) in (count - 1, count)
    earned = [cost * number / 0.1 for number in range(1, count + 1)]
    best = [at[one] for one in place(at, end, count, 1e3 * end, earned)]
    assert recovery(taken, end, 1e3 * end) <= 1.05 * recovery(best, end, 1e3 * end)


@pytest.mark.parametrize("allowance", [0.1, 1e9])
@pytest.mark.parametrize("seconds", [[5.0] * 100, [500.0, *[0.1] * 99]])
def test_where_more_checkpoints_are_allowed_than_there_are_hints_nearly_all_are(
    seconds: list[float], allowance: float
) -> None:
    clock = Clock()
    pace = Pace(allowance, COST, clock)
    steps: Iterator[Arrival] = ((one, [(1, i, 100)]) for i, one in enumerate(seconds, 1))
    assert len(run(pace, clock, steps, itertools.repeat(COST))) >= 98


def growing() -> Iterator[Arrival]:
    """A list to which the loop adds: it had one item when the loop began."""
    return ((0.02, [(1, i, 1)]) for i in range(1, 256))


@pytest.mark.parametrize("program", [nested(5, 50, 0.02, 0.02, known=False), growing()])
def test_where_the_length_is_not_known_the_allowance_is_used_and_kept(program: Iterator[Arrival]) -> None:
    clock = Clock()
    pace = Pace(0.1, COST, clock)
    taken = run(pace, clock, program, itertools.repeat(COST))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *taken, pace.own_seconds()])]
    assert pace.own_seconds() == pytest.approx(5.1, rel=1e-3)
    assert pace.spent_seconds <= 0.1 * pace.own_seconds()
    assert max(gaps) <= COST / 0.1 + 0.05


@settings(deadline=None)
@given(
    allowance=st.floats(0.01, 1.0),
    costs=st.lists(st.floats(0.001, 0.5), min_size=1, max_size=4),
    loops=st.tuples(st.integers(1, 6), st.integers(1, 30)),
    known=st.booleans(),
    until=st.integers(1, 200),
)
def test_wherever_a_function_ends_checkpoints_took_no_more_than_the_allowance_and_the_last_surprise(
    allowance: float, costs: list[float], loops: tuple[int, int], known: bool, until: int
) -> None:
    clock, surprises = Clock(), [0.0]
    pace = Pace(allowance, costs[0], clock)

    def noted() -> Iterator[float]:
        for cost in itertools.cycle(costs):
            surprises.append(cost - statistics.median(pace.recent_seconds() or costs[:1]))
            yield cost

    run(pace, clock, itertools.islice(nested(*loops, 0.02, 0.1, known=known), until), noted())
    exceeding = pace.spent_seconds - allowance * pace.own_seconds()
    assert exceeding <= (1 + allowance) * max(surprises) + CLOSE


def test_every_hint_is_a_checkpoint_without_a_limit_and_a_call_that_goes_on_knows_the_costs() -> None:
    clock = Clock()
    pace = Pace(math.inf, 0.0, clock)
    assert len(run(pace, clock, nested(2, 3, 0.1, 0.1, known=True), itertools.repeat(COST))) == 8
    later = Pace(0.1, 0.0, clock)
    later.learn(pace.recent_seconds())
    clock.now += COST / 0.1 - 0.01
    assert not later.due([(1, 1, None), (2, 1, 3)])
    clock.now += 0.02
    assert later.due([(1, 1, None), (2, 2, 3)])


def test_a_hint_is_not_looked_at_while_the_cost_of_a_checkpoint_is_not_known_yet() -> None:
    clock = Clock()
    pace = Pace(0.1, COST, clock)
    pace.looked(0.0, 0)
    clock.now += 1.01 * COST / 0.1
    assert pace.due([])
    pace.copied(0.0)
    assert not pace.due([])
    assert not pace.may_look()
    pace.written(COST, WRITE)
    clock.now += 3 * COST / 0.1
    assert pace.due([])
    assert pace.may_look()


def test_a_call_that_has_gone_on_places_among_the_hints_that_are_left() -> None:
    arrivals = list(nested(4, 50, 0.02, 0.02, known=True))
    at, clock = 4 * 51 // 3, Clock()
    pace = Pace(0.1, 0.0, clock)
    pace.learn([COST])
    pace.begin(arrivals[at][1])
    taken = run(pace, clock, iter(arrivals[at + 1 :]), itertools.repeat(COST))
    own = pace.own_seconds()
    even = [own * one / (len(taken) + 1) for one in range(1, len(taken) + 1)]
    assert len(taken) >= math.floor(0.1 * own / COST) - 1
    assert recovery(taken, own, 1e3) <= 1.1 * recovery(even, own, 1e3)


def test_a_plan_is_left_where_its_loop_begins_again() -> None:
    clock = Clock()
    pace = Pace(0.1, COST, clock)
    for _ in range(3):
        taken = run(pace, clock, nested(4, 50, 0.02, 0.02, known=True), itertools.repeat(COST))
        assert len(taken) >= 8
