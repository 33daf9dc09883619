"""Sums of tokens, and when each expert was last saved."""

import json
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import Expert
from cpsr.experts.tokens import POINTS_KEPT, TokenHistory
from cpsr.state.codec import decode, encode
from tests.engines.moe.mixtures import mixture

LAYERS = mixture(2, 1)
FIRST, SECOND, ALONE = Expert(0, 0), Expert(0, 1), Expert(1, 0)


def step(history: TokenHistory, iteration: int, *experts: Expert, tokens: Any = ((1, 2), (3,))) -> None:
    """So many tokens, one to the first expert, 2 to the second and 3 to the other, and a checkpoint."""
    history.count(tokens)
    history.reach(iteration)
    history.begun(iteration, experts)


def rows(of_layers: tuple[numpy.ndarray[Any, Any], ...]) -> list[list[float]]:
    return [layer.tolist() for layer in of_layers]


def test_between_points_and_beyond_them_tokens_come_at_a_steady_rate() -> None:
    history = TokenHistory(LAYERS)
    step(history, 10, FIRST, tokens=([0, 0], [10]))
    step(history, 30, SECOND, tokens=([20, 0], [40]))
    lost, routed = history.restored(numpy.array([20, 20, 20]), 40)
    assert rows(lost) == [[20, 0], [40]]
    assert rows(routed) == [[30, 0], [70]]


def test_what_was_undone_is_not_counted() -> None:
    history = TokenHistory(LAYERS)
    for iteration, expert in ((10, FIRST), (20, SECOND), (30, ALONE)):
        step(history, iteration, expert, tokens=([1, 1], [1]))
    history.reach(15)
    assert history.state_dict()["iterations"][-1] == 15
    assert rows(history.restored(numpy.array([15, 15, 15]), 15)[1]) == [[1.5, 1.5], [1.5]]


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=3, max_size=3), max_size=5), st.integers(0, 80))
def test_a_checkpoint_brings_it_back(found: list[list[int]], taken_at: int) -> None:
    history = TokenHistory(LAYERS)
    for place, row in enumerate(found):
        step(history, 10 * place + 10, (FIRST, SECOND, ALONE)[place % 3], tokens=(row[:2], row[2:]))
    data, tensors = encode(history.state_dict())
    back = TokenHistory(LAYERS)
    back.load_state_dict(decode(json.loads(json.dumps(data)), tensors))
    for one in (back, history):
        one.count([[5, 5], [5]])
        one.reach(70)
    again, first = (one.restored(numpy.full(3, taken_at), 80) for one in (back, history))
    assert [rows(one) for one in again] == [rows(one) for one in first]


def test_other_experts_are_refused_and_nothing_changes() -> None:
    history = TokenHistory(LAYERS)
    step(history, 10, FIRST)
    before = history.state_dict()
    other: dict[str, Any] = TokenHistory(mixture(2, 2)).state_dict()
    with pytest.raises(ValueError, match="tokens of 4 experts were saved, and the model has 3"):
        history.load_state_dict(other)
    assert history.state_dict()["iterations"] == before["iterations"]
    assert numpy.array_equal(history.state_dict()["sums"], before["sums"])


def test_what_was_routed_since_the_last_checkpoint_of_each_is_unsaved() -> None:
    history = TokenHistory(LAYERS)
    step(history, 10, FIRST, SECOND, ALONE)
    step(history, 20, FIRST)
    step(history, 30, SECOND)
    assert rows(history.unsaved_tokens) == [[1, 0], [6]]
    assert rows(history.ages) == [[1, 0], [2]]


def test_a_recovery_loses_what_came_between_each_snapshot_and_the_checkpoint() -> None:
    history = TokenHistory(LAYERS)
    for place, expert in enumerate((FIRST, SECOND, ALONE, FIRST)):
        step(history, 10 * place + 10, expert)
    lost, routed = history.restored(numpy.array([40, 20, 30]), 40)
    assert rows(lost) == [[0, 4], [3]]
    assert rows(routed) == [[4, 8], [12]]
    assert rows(history.unsaved_tokens) == [[0, 0], [0]]
    step(history, 50, FIRST)
    assert rows(history.unsaved_tokens) == [[0, 2], [3]]


def test_what_is_still_missing_from_an_earlier_recovery_is_not_lost_again() -> None:
    """Its next checkpoint came before the expert's turn."""
    history = TokenHistory(LAYERS)
    step(history, 10, FIRST, SECOND, ALONE)
    step(history, 20, FIRST)
    lost, _ = history.restored(numpy.array([20, 10, 10]), 20)
    assert rows(lost) == [[0, 2], [3]]
    step(history, 30, ALONE)
    later = TokenHistory(LAYERS)
    later.load_state_dict(history.state_dict())
    lost, routed = later.restored(numpy.array([20, 10, 30]), 30)
    assert rows(lost) == [[1, 2], [0]]
    assert rows(routed) == [[3, 6], [9]]


@given(st.lists(st.frozensets(st.sampled_from([FIRST, SECOND, ALONE])), max_size=12))
def test_against_a_list_of_what_was_saved(checkpoints: list[frozenset[Expert]]) -> None:
    history = TokenHistory(LAYERS)
    tokens = dict.fromkeys(history.experts, 0.0)
    for place, experts in enumerate(checkpoints):
        step(history, 10 * place + 10, *experts)
        for expert, more in zip(history.experts, (1, 2, 3), strict=True):
            tokens[expert] = 0.0 if expert in experts else tokens[expert] + more
        assert numpy.concatenate(history.unsaved_tokens).tolist() == list(tokens.values())


def test_however_long_it_runs_it_keeps_a_row_for_each_expert_and_the_newest() -> None:
    history = TokenHistory(LAYERS)
    for place in range(50):
        step(history, 10 * place + 10, FIRST if place % 2 else SECOND)  # and never the other layer's
        assert len(history.state_dict()["iterations"]) <= len(history.experts) + POINTS_KEPT + 1
    assert rows(history.unsaved_tokens) == [[0, 2], [150]]
