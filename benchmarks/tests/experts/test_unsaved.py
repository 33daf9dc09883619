"""The ledger of unsaved tokens against the history it stands for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.benchmarks.experts.unsaved import UnsavedTokens
from cpsr.engines.moe.operators import Expert
from cpsr.engines.moe.popularity import PerExpert
from tests.engines.moe.mixtures import mixture

LAYERS = mixture(2, 3)


def plain(values: PerExpert) -> list[list[float]]:
    return [layer.tolist() for layer in values]


def test_a_run_by_hand() -> None:
    ledger = UnsavedTokens(LAYERS)
    ledger.observe([[3, 1], [0, 2, 2]])
    ledger.saved([Expert(0, 0), Expert(1, 1)])
    ledger.observe([[1, 1], [0, 1, 3]])
    assert plain(ledger.tokens_at_snapshot) == [[0, 1], [0, 0, 2]]
    assert plain(ledger.tokens) == [[1, 2], [0, 1, 5]]
    assert plain(ledger.ages) == [[0, 1], [1, 0, 1]]
    ledger.saved([Expert(0, 1)])
    assert plain(ledger.tokens_at_snapshot) == plain(ledger.tokens) == [[1, 0], [0, 1, 5]]
    assert plain(ledger.ages) == [[1, 0], [2, 1, 2]]
    ledger.restored()
    assert plain(ledger.tokens_at_snapshot) == plain(ledger.tokens) == [[0, 0], [0, 0, 0]]


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.sets(st.integers(0, 2)))))
def test_unsaved_is_what_came_after_the_last_snapshot_of_an_expert(steps: list[tuple[list[int], set[int]]]) -> None:
    ledger = UnsavedTokens(mixture(3))
    for counts, experts in steps:
        ledger.observe([counts])
        ledger.saved(Expert(0, index) for index in experts)
    for index in range(3):
        last = max((place for place, (_, experts) in enumerate(steps) if index in experts), default=-1)
        assert ledger.tokens[0][index] == sum(counts[index] for counts, _ in steps[last + 1 :])
        assert ledger.ages[0][index] == len(steps) - 1 - last


@pytest.mark.parametrize("expert", [Expert(2, 0), Expert(0, 2), Expert(-1, 0), Expert(0, -1)])
def test_a_snapshot_of_an_expert_that_there_is_not_is_refused(expert: Expert) -> None:
    ledger = UnsavedTokens(LAYERS)
    ledger.observe([[3, 1], [0, 2, 2]])
    with pytest.raises(ValueError, match="the model has no Expert"):
        ledger.saved([Expert(0, 0), expert])
    assert plain(ledger.tokens) == [[3, 1], [0, 2, 2]]
    assert plain(ledger.ages) == [[0, 0], [0, 0, 0]]
