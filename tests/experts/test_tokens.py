"""Sums of tokens, and when each expert was last saved: chosen, committed, given back, restored."""

import json
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import Expert
from cpsr.experts.tokens import POINTS_KEPT, SavedExperts, TokenHistory
from cpsr.state.codec import decode, encode
from tests.engines.moe.mixtures import mixture

LAYERS = mixture(2, 1)


def counted(*rows: tuple[int, list[list[int]]], start: int = 0) -> TokenHistory:
    """Every one of these iterations a point."""
    history = TokenHistory(LAYERS, start)
    for iteration, tokens in rows:
        history.count(tokens)
        history.reach(iteration)
        history.mark()
    return history


def until(history: TokenHistory, *iterations: int) -> list[list[float]]:
    return [layer.tolist() for layer in history.until(numpy.array(iterations))]


def test_every_expert_up_to_an_iteration_of_its_own() -> None:
    history = counted((10, [[1, 2], [3]]), (20, [[10, 20], [30]]))
    assert until(history, 20, 10, 0) == [[11, 2], [0]]


def test_between_points_and_beyond_them_tokens_come_at_a_steady_rate() -> None:
    history = counted((10, [[0, 0], [10]]), (30, [[20, 0], [40]]))
    assert until(history, 20, 20, 20) == [[10, 0], [30]]
    assert until(history, 40, 40, 40) == [[30, 0], [70]]


def test_what_was_undone_is_not_counted() -> None:
    history = counted((10, [[1, 1], [1]]), (20, [[1, 1], [1]]), (30, [[1, 1], [1]]))
    history.reach(15)
    assert history.state_dict()["iterations"] == [0, 10, 15]
    assert until(history, 15, 15, 15) == [[1.5, 1.5], [1.5]]


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=3, max_size=3), max_size=5))
def test_a_checkpoint_brings_it_back(rows: list[list[int]]) -> None:
    history = counted(*((10 * place + 10, [row[:2], row[2:]]) for place, row in enumerate(rows)))
    data, tensors = encode(history.state_dict())
    back = TokenHistory(LAYERS)
    back.load_state_dict(decode(json.loads(json.dumps(data)), tensors))
    for one in (back, history):
        one.count([[5, 5], [5]])
        one.reach(70)
        one.mark()
    for iteration in (0, 5, 10, 15, 55, 70, 80):
        assert until(back, *[iteration] * 3) == until(history, *[iteration] * 3)
    assert until(back, 70, 70, 70)[1] == [sum(row[2] for row in rows) + 5]


def test_other_experts_are_refused_and_nothing_changes() -> None:
    history = counted((10, [[1, 2], [3]]))
    before = history.state_dict()
    other: dict[str, Any] = TokenHistory(mixture(2, 2)).state_dict()
    with pytest.raises(ValueError, match="tokens of 4 experts were saved, and the model has 3"):
        history.load_state_dict(other)
    assert history.state_dict()["iterations"] == before["iterations"]
    assert numpy.array_equal(history.state_dict()["sums"], before["sums"])


FIRST, SECOND, ALONE = Expert(0, 0), Expert(0, 1), Expert(1, 0)


def step(saved: SavedExperts, iteration: int, *experts: Expert) -> None:
    """One token to the first expert, 2 to the second and 3 to the other, and a checkpoint."""
    saved.history.count([[1, 2], [3]])
    saved.history.reach(iteration)
    saved.begun(iteration, experts)


def unsaved(saved: SavedExperts) -> list[list[float]]:
    return [layer.tolist() for layer in saved.unsaved_tokens]


def ages(saved: SavedExperts) -> list[list[float]]:
    return [layer.tolist() for layer in saved.ages]


def test_what_was_not_committed_is_given_back_when_a_later_one_was() -> None:
    saved = SavedExperts(LAYERS)
    step(saved, 10, FIRST, SECOND, ALONE)
    assert saved.settle(10) == []
    step(saved, 20, FIRST)
    step(saved, 30, SECOND)
    assert saved.settle(10) == []
    assert unsaved(saved) == [[1, 0], [6]]
    step(saved, 40, ALONE)
    assert saved.settle(30) == [frozenset({FIRST})]
    assert unsaved(saved) == [[3, 2], [0]]
    assert ages(saved) == [[3, 1], [0]]
    assert saved.settle(40) == []
    assert ages(saved) == [[3, 1], [0]]


def test_a_recovery_loses_what_came_between_each_snapshot_and_the_checkpoint() -> None:
    saved = SavedExperts(LAYERS)
    for place, expert in enumerate((FIRST, SECOND, ALONE, FIRST)):
        step(saved, 10 * place + 10, expert)
        saved.settle(10 * place + 10)
    lost, routed = saved.restored(numpy.array([40, 20, 30]), 40)
    assert [layer.tolist() for layer in lost] == [[0, 4], [3]]
    assert [layer.tolist() for layer in routed] == [[4, 8], [12]]
    assert unsaved(saved) == [[0, 0], [0]]
    step(saved, 50, FIRST)
    assert unsaved(saved) == [[0, 2], [3]]


def test_what_is_still_missing_from_an_earlier_recovery_is_not_lost_again() -> None:
    """Its next checkpoint came before the expert's turn."""
    saved = SavedExperts(LAYERS)
    step(saved, 10, FIRST, SECOND, ALONE)
    step(saved, 20, FIRST)
    lost, _ = saved.restored(numpy.array([20, 10, 10]), 20)
    assert [layer.tolist() for layer in lost] == [[0, 2], [3]]
    step(saved, 30, ALONE)
    later = SavedExperts(LAYERS)
    later.load_state_dict(saved.state_dict())
    lost, routed = later.restored(numpy.array([20, 10, 30]), 30)
    assert [layer.tolist() for layer in lost] == [[1, 2], [0]]
    assert [layer.tolist() for layer in routed] == [[3, 6], [9]]


@given(st.lists(st.tuples(st.frozensets(st.sampled_from([FIRST, SECOND, ALONE])), st.booleans()), max_size=12))
def test_against_a_list_of_what_was_saved(checkpoints: list[tuple[frozenset[Expert], bool]]) -> None:
    """Each checkpoint is settled before the next one begins; those that fail are known by the next that does not."""
    saved = SavedExperts(LAYERS)
    tokens, committed, failed = dict.fromkeys(saved.experts, 0.0), None, False
    for place, (experts, succeeds) in enumerate(checkpoints):
        iteration = 10 * place + 10
        step(saved, iteration, *experts)
        for expert, more in zip(saved.experts, (1, 2, 3), strict=True):
            tokens[expert] += more
        failed |= not succeeds
        if succeeds:
            committed = iteration
            for expert in experts:
                tokens[expert] = 0.0
        given_back = saved.settle(committed)
        assert bool(given_back) == (succeeds and failed)
        if succeeds:
            failed = False
            assert numpy.concatenate(saved.unsaved_tokens).tolist() == list(tokens.values())


def test_however_long_it_runs_it_keeps_a_row_for_each_expert_and_the_newest() -> None:
    saved = SavedExperts(LAYERS)
    for place in range(50):
        step(saved, 10 * place + 10, FIRST if place % 2 else SECOND)  # and never the other layer's
        saved.settle(10 * place + 10)
        assert len(saved.history.state_dict()["iterations"]) <= len(saved.experts) + POINTS_KEPT + 1
    assert unsaved(saved) == [[0, 2], [150]]
