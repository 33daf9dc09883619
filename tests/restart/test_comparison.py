"""What a restart writes down of its choice."""

from dataclasses import replace

from cpsr.checkpoint.tiers import Decision
from cpsr.restart.choice import Circumstances, all_from, candidates
from cpsr.restart.comparison import compared
from tests.restart.test_choice import RANKS, C, dumped, in_memory, in_window, priced

KNOWN = Circumstances("auto", True, 27, RANKS, prices=priced(8.0, 3.0))


def line(found: Decision, known: Circumstances, taken: str = "memory", checkpoint: int | None = C) -> str:
    there = candidates(found, checkpoint, known, older_experts=False)
    parts = next(one.parts for one in there if one.parts and one.parts[0].tier == taken)
    return compared(there, checkpoint, known, parts)


def test_it_says_what_was_taken_and_what_the_others_would_have_cost() -> None:
    assert line(Decision(in_window(21)), KNOWN) == (
        "taken: the window from iteration 21 on (6 iterations repeated, 8.00 s); instead of a prediction of 2 of 2 "
        "ranks at iteration 27 (an end cost of 8 ± 3 iterations, 10.50 s), "
        "checkpoint 20 (7 iterations repeated, 9.00 s)"
    )


def test_without_prices_iterations_are_all_that_is_known() -> None:
    found = line(Decision(in_memory(25)), replace(KNOWN, prices=None), "disk")
    assert found == (
        "taken: checkpoint 20 (7 iterations repeated); instead of a prediction of 2 of 2 ranks at iteration 27 (at an "
        "end cost that no plan knows), the snapshot of iteration 25 in memory (2 iterations repeated)"
    )


def test_mode_exact_says_that_it_is_the_reason() -> None:
    found = line(Decision(in_window(21), dumped(27, True, True)), replace(KNOWN, mode="exact"))
    assert "the emergency dumps of iteration 27 (0 iterations repeated, 2.00 s), not in mode exact" in found
    assert "7 iterations repeated, 9.00 s)" in found


def test_only_what_is_lost_is_priced() -> None:
    found = line(Decision(in_window(21), dumped(27, True, False)), KNOWN)
    assert "a prediction of 1 of 2 ranks at iteration 27 (an end cost of 4 ± 2 iterations, 6.50 s)" in found


def test_nothing_is_compared_where_nothing_was_lost_or_nothing_else_is_there() -> None:
    assert line(Decision(in_memory(25)), replace(KNOWN, failure_iteration=None)) == ""
    alone = candidates(Decision(()), C, replace(KNOWN, failure_iteration=None), older_experts=False)
    assert compared(alone, C, KNOWN, all_from("disk", C, RANKS)) == ""


def test_a_run_without_a_checkpoint_could_have_begun_anew() -> None:
    assert line(Decision(in_memory(25)), replace(KNOWN, prices=None), checkpoint=None) == (
        "taken: the snapshot of iteration 25 in memory (2 iterations repeated); instead of the start of the run "
        "(27 iterations repeated)"
    )
