"""Experts of a checkpoint that was saved sparsely, and those that machines which are left have in memory."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from cpsr.restart.experts import nearest

C = 20


def test_the_nearest_iteration_that_all_holders_have_is_taken() -> None:
    held: list[Mapping[str, int]] = [{"a": 8, "b": 16}, {"a": 8}, {}]
    there: list[Mapping[str, Sequence[int]]] = [{"a": [17, 23], "b": [25]}, {"a": [23, 29]}, {"a": [20]}]
    assert nearest(C, held, there) == {"a": 23}, "b's of 25 is further away than the 16 of the checkpoint"


def test_an_expert_whose_parameters_lie_on_two_ranks_comes_whole_or_not_at_all() -> None:
    held: list[Mapping[str, int]] = [{"a": 4}, {"a": 4}]
    assert nearest(C, held, [{"a": [12]}, {}]) == {}
    assert nearest(C, held, [{"a": [12]}, {"a": [12, 19]}]) == {"a": 12}


@given(
    held=st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(1, C)), min_size=1, max_size=3),
    there=st.lists(
        st.dictionaries(st.sampled_from("ab"), st.lists(st.integers(1, 2 * C), max_size=3)), min_size=3, max_size=3
    ),
)
def test_nothing_is_taken_that_a_holder_lacks_or_that_is_further_away(
    held: list[dict[str, int]], there: list[dict[str, list[int]]]
) -> None:
    for unit, at in nearest(C, held, there).items():
        holders = [rank for rank, part in enumerate(held) if unit in part]
        assert holders
        for rank in holders:
            assert at in there[rank][unit]
        assert abs(C - at) < C - min(held[rank][unit] for rank in holders)
