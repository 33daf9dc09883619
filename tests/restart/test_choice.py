"""The one rule by which all ranks choose the state that the run continues from."""

import random
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cpsr.checkpoint.tiers import Decision, Entry, Source
from cpsr.journal import Beginning
from cpsr.restart.choice import ATTEMPTS, Candidate, Choice, Circumstances, Mode, all_from, candidates, choose
from cpsr.restart.restored_state import Recomputes

C, RANKS = 20, 2
EXACT_TIERS = ("disk", "memory")


def entry(rank: int, iteration: int, kind: Any = "snapshot") -> Entry:
    return Entry(rank, iteration, kind, "node", str(rank))


def in_memory(iteration: int, ranks: int = RANKS) -> tuple[Source, ...]:
    return tuple(Source(rank, "memory", iteration, entry(rank, iteration)) for rank in range(ranks))


def dumped(iteration: int, *left: bool) -> tuple[Source, ...]:
    return tuple(
        Source(rank, "departure", iteration, entry(rank, iteration, "departure"))
        if there
        else Source(rank, "predicted", iteration)
        for rank, there in enumerate(left)
    )


def in_window(iteration: int, ranks: int = RANKS) -> tuple[Source, ...]:
    return tuple(Source(rank, "memory", iteration, entry(rank, iteration, "window")) for rank in range(ranks))


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Candidate], Circumstances]:
    """What `decide` can have found, and every circumstance."""
    ranks = draw(st.integers(1, 4))
    c = draw(st.none() | st.just(C))
    f = draw(st.none() | st.integers(C + 1, C + 9))
    older = c is not None and draw(st.booleans())
    memory = draw(st.none() | st.integers(C + (not older), C + 9))
    kept = draw(st.sampled_from([in_memory, in_window]))
    exact = kept(memory, ranks) if memory is not None else () if c is None else all_from("disk", C, ranks)
    left: tuple[Source, ...] = ()
    if c is not None and f is not None and draw(st.booleans()):
        there = draw(st.lists(st.booleans(), min_size=ranks, max_size=ranks).filter(any))
        left = dumped(max(f, exact[0].iteration + 1), *there)
    modes: list[Mode] = ["auto", "predict", "exact"]
    mode = draw(st.sampled_from(modes))
    known = Circumstances(
        mode=mode,
        # False is what a user has asked for, and then the mode is exact.
        inexact=mode != "exact" or draw(st.booleans()),
        failure_iteration=f,
        ranks=ranks,
        moves=draw(st.booleans()),
        failures=draw(st.integers(0, 3)),
        last_failure="ValueError",
        dumps=draw(st.integers(0, 3)),
        memory_interval_iterations=draw(st.none() | st.integers(1, 9)),
    )
    return candidates(Decision(exact, left), c, known, older_experts=older), known


@given(situations(), st.randoms())
@settings(max_examples=400)
def test_ranks_never_choose_differently(
    situation: tuple[list[Candidate], Circumstances], shuffled: random.Random
) -> None:
    there, known = situation
    other = list(there)
    shuffled.shuffle(other)
    assert choose(other, known) == choose(there, known)


@given(situations())
@settings(max_examples=600)
def test_no_better_whole_state_comes_after_a_worse_one(situation: tuple[list[Candidate], Circumstances]) -> None:
    there, known = situation
    whole = [one for one in choose(there, known).order if not one.near_failure]
    assert [one.iteration for one in whole] == sorted((one.iteration for one in whole), reverse=True)
    for better, worse in pairwise(whole):
        if better.iteration == worse.iteration:
            assert better.beginning is Beginning.EXACT
    allowed = [one for one in there if not one.near_failure]
    if known.inexact:
        assert set(whole) == set(allowed), "each of them can take the place of one that cannot be read"


@given(situations())
@settings(max_examples=600)
def test_a_state_near_the_failure_is_taken_only_where_iterations_would_be_lost(
    situation: tuple[list[Candidate], Circumstances],
) -> None:
    there, known = situation
    order = choose(there, known).order
    f = known.failure_iteration
    near = [one for one in order if one.near_failure and one.iteration != C]
    moved = [one for one in order if one.near_failure and one.iteration == C]
    assert [*near, *moved] == list(order[: len(near) + len(moved)])
    assert len(near) <= 1
    assert len(moved) <= (known.moves and known.mode == "auto" and len(near))
    for one in near:
        assert f is not None
        assert one.cost_iterations(f) == 0
        assert all(whole.iteration < f for whole in order[1:])


@given(situations())
@settings(max_examples=600)
def test_in_mode_auto_an_exact_snapshot_that_loses_few_iterations_goes_before_what_is_not_exact(
    situation: tuple[list[Candidate], Circumstances],
) -> None:
    there, known = situation
    f, every = known.failure_iteration, known.memory_interval_iterations
    found = [one for one in there if one.in_memory and one.beginning is Beginning.EXACT and one.iteration >= C]
    found = [one for one in found if not one.is_window]
    if known.mode != "auto" or f is None or every is None or not found or f - found[0].iteration > 2 * every:
        return
    assert choose(there, known).order[0] == found[0]


@given(situations())
@settings(max_examples=600)
def test_only_what_was_lost_is_predicted(situation: tuple[list[Candidate], Circumstances]) -> None:
    there, known = situation
    for one in choose(there, known).order:
        assert one.beginning.predicted == (one.lost_ranks > 0)
        if one.beginning.predicted and one.iteration != C:  # where none is lost, and all may be moved
            others = [other for other in there if other.near_failure and other.lost_ranks < one.lost_ranks]
            assert others == [] or known.dumps >= ATTEMPTS


@given(situations())
@settings(max_examples=600)
def test_mode_exact_takes_nothing_that_the_run_never_had(situation: tuple[list[Candidate], Circumstances]) -> None:
    there, known = situation
    if known.mode != "exact":
        return
    choice = choose(there, known)
    assert choice.refusal is None
    for one in choice.order:
        assert {part.tier for part in one.parts} <= set(EXACT_TIERS)
        assert known.inexact or not one.beginning.labelled


@given(situations())
@settings(max_examples=600)
def test_attempts_from_one_checkpoint_come_to_an_end(situation: tuple[list[Candidate], Circumstances]) -> None:
    there, known = situation
    choice = choose(there, known)
    assert known.dumps < ATTEMPTS or not any(one.dumped for one in choice.order)
    if known.failures >= known.failures_allowed:
        assert not any(one.near_failure for one in choice.order)


@given(situations())
@settings(max_examples=600)
def test_it_says_why_iterations_are_recomputed_that_need_not_be(
    situation: tuple[list[Candidate], Circumstances],
) -> None:
    there, known = situation
    choice = choose(there, known)
    f, near = known.failure_iteration, [one for one in there if one.near_failure and one.iteration != C]
    lost = f is not None and choice.order != () and choice.order[0].cost_iterations(f) > 0
    assert (choice.refusal is not None) == (lost and near != [] and known.mode != "exact")


def known(**changes: Any) -> Circumstances:
    values: dict[str, Any] = {"mode": "auto", "inexact": True, "failure_iteration": 23, "ranks": RANKS}
    return Circumstances(**(values | changes))


def chosen(found: Decision, circumstances: Circumstances, *, older: bool = False) -> Choice:
    return choose(candidates(found, C, circumstances, older_experts=older), circumstances)


DISK = all_from("disk", C, RANKS)
FROM_DISK = Candidate(Beginning.EXACT, DISK)
PREDICTED = Candidate(Beginning.PREDICTED, all_from("predicted", 23, RANKS))


def test_a_failure_is_predicted_and_the_checkpoint_is_next() -> None:
    assert chosen(Decision(DISK), known()) == Choice((PREDICTED, FROM_DISK))


def test_the_checkpoint_is_moved_where_that_is_asked_for_and_nothing_nearer_is_taken() -> None:
    moved = Candidate(Beginning.PREDICTED, all_from("predicted", C, RANKS))
    partly = Decision(DISK, dumped(23, True, False))
    near = Candidate(Beginning.PREDICTED, partly.departed)
    assert chosen(partly, known(moves=True)).order == (near, moved, FROM_DISK)
    assert chosen(partly, known(moves=True, mode="predict")).order == (near, FROM_DISK)
    assert chosen(Decision(DISK), known(moves=True, failure_iteration=None)).order == (FROM_DISK,)


def test_an_older_snapshot_in_memory_stands_between_the_failure_and_the_checkpoint() -> None:
    memory = Candidate(Beginning.EXACT, in_memory(22))
    assert chosen(Decision(memory.parts), known()).order == (PREDICTED, memory, FROM_DISK)
    newest = Candidate(Beginning.EXACT, in_memory(23))
    assert chosen(Decision(newest.parts), known()) == Choice((newest, FROM_DISK))


def test_a_window_goes_before_a_prediction_and_not_before_what_all_ranks_left() -> None:
    parts = in_window(21)
    window = Candidate(Beginning.EXACT, parts)
    assert chosen(Decision(parts), known()).order == (window, FROM_DISK)
    left = dumped(23, True, True)
    assert chosen(Decision(parts, left), known()).order[0] == Candidate(Beginning.EMERGENCY_DUMP, left)
    assert chosen(Decision(parts, left), known(mode="exact")).order == (window, FROM_DISK)


@given(situations())
@settings(max_examples=600)
def test_a_window_is_passed_over_only_for_what_all_ranks_left(
    situation: tuple[list[Candidate], Circumstances],
) -> None:
    there, known = situation
    order = [one for one in choose(there, known).order if not one.near_failure or one.iteration != C]
    f = known.failure_iteration
    windows = [one for one in there if one.is_window and f is not None and C < one.iteration < f]
    if known.mode != "auto" or not windows or order[0] == windows[0]:
        return
    assert order[1] == windows[0]
    assert (order[0].dumped, order[0].lost_ranks) == (True, 0)


def test_a_peer_may_have_been_killed_meanwhile_and_a_rank_alone_has_none() -> None:
    assert chosen(Decision(DISK), known(failures=1)).order == (PREDICTED, FROM_DISK)
    alone = known(failures=1, last_failure="ValueError: no", ranks=1)
    choice = chosen(Decision(all_from("disk", C, 1)), alone)
    assert [one.beginning for one in choice.order] == [Beginning.EXACT]
    assert choice.refusal is not None
    assert choice.refusal.why is Recomputes.FAILED_BEFORE
    assert "(ValueError: no)" in choice.refusal.reason


def test_younger_experts_in_memory_go_before_the_checkpoint_of_the_same_iteration() -> None:
    memory, older = Candidate(Beginning.EXACT, in_memory(C)), Candidate(Beginning.OLDER_EXPERTS, DISK)
    found, at_checkpoint = Decision(memory.parts), known(failure_iteration=None)
    assert chosen(found, at_checkpoint, older=True).order == (memory, older)
    asked = known(failure_iteration=None, mode="exact", inexact=False)
    assert chosen(found, asked, older=True).order == (memory,)


def test_without_a_checkpoint_what_is_in_memory_goes_before_nothing() -> None:
    scratch = Candidate(Beginning.SCRATCH)
    memory = Candidate(Beginning.EXACT, in_memory(3))
    for found, order in ((Decision(()), (scratch,)), (Decision(memory.parts), (memory, scratch))):
        assert choose(candidates(found, None, known(), older_experts=False), known()).order == order
