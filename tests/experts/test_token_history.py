"""Sums of tokens at a few iterations, and between them."""

import json
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.token_history import POINTS_KEPT, TokenHistory
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


def test_nothing_is_known_of_what_came_before_the_first_point() -> None:
    history = counted((110, [[1, 2], [3]]), start=100)
    assert until(history, 50, 50, 100) == [[0, 0], [0]]
    assert until(TokenHistory(LAYERS, 100), 120, 120, 120) == [[0, 0], [0]]


def test_what_was_undone_is_not_counted() -> None:
    history = counted((10, [[1, 1], [1]]), (20, [[1, 1], [1]]), (30, [[1, 1], [1]]))
    history.reach(15)
    assert history.state_dict()["iterations"] == [0, 10, 15]
    assert until(history, 15, 15, 15) == [[1.5, 1.5], [1.5]]


def test_kept_are_the_points_that_are_asked_for_and_the_newest() -> None:
    history = counted(*((iteration, [[1, 0], [0]]) for iteration in range(10, 60, 10)))
    history.keep({20})
    assert history.state_dict()["iterations"][:-1] == [20, 40, 50]
    assert POINTS_KEPT == 2
    assert until(history, 20, 50, 50) == [[2, 0], [0]]


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
