"""The chosen hints against brute force, and loops against the same tasks unrolled."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.errors import ConfigError
from cpsr.hints.placement import Task, place

CLOSE = 1e-9
SECONDS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 5.0]), st.floats(0.1, 20.0))
MTBF = st.sampled_from([5.0, 50.0, 500.0])


def recovery(at: Sequence[float], seconds: float, mtbf: float) -> float:
    """The paper's formula, with checkpoints at these times."""
    blocks = (after - before for before, after in itertools.pairwise([0.0, *at, seconds]))
    return sum(block / 2 * math.expm1(block / mtbf) for block in blocks)


@given(st.lists(SECONDS, min_size=1, max_size=9).filter(any), st.integers(0, 9), MTBF)
def test_no_other_hints_are_better(seconds: list[float], count: int, mtbf: float) -> None:
    placement = place([Task(one, hint=True) for one in seconds], count, mtbf)
    *ends, end = itertools.accumulate(seconds)
    chosen = [at for size in range(min(count, len(ends)) + 1) for at in itertools.combinations(ends, size)]
    least = min(recovery(at, end, mtbf) for at in chosen)
    assert placement.recovery_seconds == pytest.approx(least, rel=CLOSE, abs=CLOSE)
    assert placement.unprotected_recovery_seconds == pytest.approx(recovery([], end, mtbf), rel=CLOSE, abs=CLOSE)
    assert len(placement.checkpoints) <= count


REPEATED = st.sampled_from([1, 2, 3, 7])
TASK = st.recursive(
    st.builds(Task, SECONDS, st.booleans(), REPEATED),
    lambda inner: st.builds(
        Task, st.just(0.0), st.booleans(), REPEATED, st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=4,
)


def unrolled(tasks: Sequence[Task], first: int = 0, start: float = 0.0) -> Iterator[tuple[float, int]]:
    """Every hint as the program comes to it: time and place."""
    for task in tasks:
        first += task.hints
        for _ in range(task.repetitions):
            yield from unrolled(task.body, first - task.hints, start)
            start += task.once_seconds
            if task.hint:
                yield start, first - 1


@given(st.lists(TASK, min_size=1, max_size=3), st.integers(0, 20), MTBF)
def test_loops_are_unrolled(tasks: list[Task], count: int, mtbf: float) -> None:
    placement = place(tasks, count, mtbf)
    arrivals: dict[int, int] = {}
    taken = []
    for at, hint in unrolled(tasks):
        arrivals[hint] = arrivals.get(hint, 0) + 1
        if (hint, arrivals[hint]) in placement.checkpoints:
            taken.append(at)
    assert len(taken) == len(placement.checkpoints)
    expected = recovery(taken, sum(task.total_seconds for task in tasks), mtbf)
    assert placement.recovery_seconds == pytest.approx(expected, rel=CLOSE, abs=CLOSE)


def test_a_program_that_would_never_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="would never end"):
        place([Task(1e6, hint=True), Task(1.0, hint=True)], 1, 1e3)


@pytest.mark.parametrize(
    ("task", "mtbf_seconds", "named"),
    [
        (Task(10.0, True), 0.0, "mtbf_seconds"),
        (Task(10.0, True), math.nan, "mtbf_seconds"),
        (Task(-1.0, True), 100.0, "seconds of a task"),
        (Task(10.0, True, 0), 100.0, "repetitions of a task"),
        (Task(10.0, True, 10**9), 100.0, "the number of hints"),
        (Task(body=(Task(math.inf),)), 100.0, "seconds of a task"),
    ],
)
def test_numbers_that_are_none_are_refused_by_name(task: Task, mtbf_seconds: float, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} .*Nothing was placed"):
        place([task], 1, mtbf_seconds)
