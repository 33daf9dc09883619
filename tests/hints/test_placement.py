"""The chosen hints against brute force, and loops against the same tasks unrolled."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.errors import ConfigError
from cpsr.hints.placement import Task, hints_of, place

CLOSE = 1e-9
SECONDS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 5.0]), st.floats(0.1, 20.0))
ALLOWANCE = st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0])
MTBF = st.sampled_from([5.0, 50.0, 500.0])


def recovery(blocks: Sequence[float], mtbf: float) -> float:
    """The paper's formula."""
    return sum(block / 2 * math.expm1(block / mtbf) for block in blocks)


def blocks(at: Sequence[float], seconds: float) -> list[float]:
    return [after - before for before, after in itertools.pairwise([0.0, *at, seconds])]


def best_by_force(tasks: Sequence[Task], allowed: float, mtbf: float) -> float:
    ends = list(itertools.accumulate(task.seconds for task in tasks))
    found = []
    for count in range(len(tasks)):
        for chosen in itertools.combinations(range(len(tasks) - 1), count):
            if math.fsum(tasks[index].cost_seconds or 0.0 for index in chosen) <= allowed + CLOSE:
                found.append(recovery(blocks([ends[index] for index in chosen], ends[-1]), mtbf))
    return min(found)


@given(st.lists(SECONDS, min_size=1, max_size=9).filter(any), ALLOWANCE, MTBF)
def test_equal_costs_are_placed_as_by_brute_force(seconds: list[float], allowance: float, mtbf: float) -> None:
    tasks = [Task(str(index), one, 2.0) for index, one in enumerate(seconds)]
    placement = place(tasks, allowance, mtbf)
    least = best_by_force(tasks, 2.0 * math.ceil(allowance * sum(seconds) / 2.0 - CLOSE), mtbf)
    assert placement.recovery_seconds == pytest.approx(least, rel=CLOSE, abs=CLOSE)
    assert placement.least_recovery_seconds == pytest.approx(least, rel=CLOSE, abs=CLOSE)


@given(
    st.lists(st.tuples(SECONDS, st.sampled_from([1.0, 2.0, 3.5])), min_size=2, max_size=9).filter(
        lambda tasks: len({cost for _, cost in tasks}) > 1 and any(seconds for seconds, _ in tasks)
    ),
    ALLOWANCE,
    MTBF,
)
def test_unequal_costs_stay_within_the_allowance_and_the_bound_holds(
    costs: list[tuple[float, float]], allowance: float, mtbf: float
) -> None:
    tasks = [Task(str(index), seconds, cost) for index, (seconds, cost) in enumerate(costs)]
    placement = place(tasks, allowance, mtbf)
    assert placement.cost_seconds <= placement.allowed_seconds + CLOSE
    least = best_by_force(tasks, placement.allowed_seconds, mtbf)
    assert placement.least_recovery_seconds <= least * (1 + CLOSE) + CLOSE
    assert placement.recovery_seconds >= least * (1 - CLOSE) - CLOSE


LEAF = st.builds(Task, st.just("task"), SECONDS, st.sampled_from([None, 1.0, 2.0]), st.sampled_from([1, 2, 3, 7]))
TASK = st.recursive(
    LEAF,
    lambda inner: st.builds(
        Task,
        st.just("loop"),
        st.just(0.0),
        st.sampled_from([None, 1.0, 2.0]),
        st.sampled_from([1, 2, 5]),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
    ),
    max_leaves=4,
)


def unrolled(tasks: Sequence[Task], first: int = 0, start: float = 0.0) -> Iterator[tuple[float, int, float]]:
    """Every hint as the program comes to it: time, place, and cost."""
    for task in tasks:
        own = first + len(hints_of(task.body))
        for _ in range(task.repetitions):
            yield from unrolled(task.body, first, start)
            start += task.once_seconds
            if task.cost_seconds is not None:
                yield start, own, task.cost_seconds
        first = own + (task.cost_seconds is not None)


@given(st.lists(TASK, min_size=1, max_size=3), ALLOWANCE, st.sampled_from([50.0, 500.0]))
def test_loops_are_unrolled_and_cost_what_their_tasks_do(tasks: list[Task], allowance: float, mtbf: float) -> None:
    placement = place(tasks, allowance, mtbf)
    arrivals: dict[int, int] = {}
    taken = []
    for at, hint, cost in unrolled(tasks):
        arrivals[hint] = arrivals.get(hint, 0) + 1
        if (hint, arrivals[hint]) in placement.checkpoints:
            taken.append((at, cost))
    assert len(taken) == len(placement.checkpoints)
    lengths = blocks([at for at, _ in taken], placement.program_seconds)
    assert placement.recovery_seconds == pytest.approx(recovery(lengths, mtbf), rel=CLOSE, abs=CLOSE)
    assert placement.cost_seconds == pytest.approx(sum(cost for _, cost in taken))
    assert placement.least_recovery_seconds <= placement.recovery_seconds * (1 + CLOSE) + CLOSE
    assert placement.recovery_seconds <= placement.unprotected_recovery_seconds * (1 + CLOSE) + CLOSE


def test_rounding_makes_no_further_checkpoint() -> None:
    tasks = [Task(str(index), 1.0, 1.0) for index in range(30)]
    assert place(tasks, 0.1, 100.0).cost_seconds == 3.0  # 0.1 * 30 is above 3 in floats


def test_a_program_that_would_never_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="would never end"):
        place([Task("long", 1e6, 1.0), Task("short", 1.0, 1.0)], 0.1, 1e3)


@pytest.mark.parametrize(
    ("task", "allowance", "mtbf_seconds", "named"),
    [
        (Task("load", 10.0, 1.0), 0.1, 0.0, "mtbf_seconds"),
        (Task("load", 10.0, 1.0), 0.1, -1.0, "mtbf_seconds"),
        (Task("load", 10.0, 1.0), 0.1, math.nan, "mtbf_seconds"),
        (Task("load", 10.0, 1.0), -0.1, 100.0, "allowance"),
        (Task("load", 10.0, 1.0), math.nan, 100.0, "allowance"),
        (Task("load", -1.0, 1.0), 0.1, 100.0, "'load': seconds"),
        (Task("load", 10.0, 0.0), 0.1, 100.0, "'load': cost_seconds"),
        (Task("load", 10.0, 1.0, 0), 0.1, 100.0, "'load': repetitions"),
        (Task("load", 10.0, 1.0, 10**9), 0.1, 100.0, "the number of hints"),
        (Task("all", body=(Task("load", math.inf, 1.0),)), 0.1, 100.0, "'load': seconds"),
    ],
)
def test_numbers_that_are_none_are_refused_by_name(
    task: Task, allowance: float, mtbf_seconds: float, named: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{named} .*Nothing was placed"):
        place([task], allowance, mtbf_seconds)
