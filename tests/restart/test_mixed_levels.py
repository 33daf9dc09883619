"""Experts of a checkpoint that was saved sparsely, and those that machines which are left have in memory."""

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from cpsr.restart.mixed_levels import nearest

C = 20


def test_the_nearest_iteration_that_all_holders_have_is_taken() -> None:
    older: list[Mapping[str, int]] = [{"a": 8, "b": 16}, {"a": 8}, {}]
    there: list[Mapping[str, Sequence[int]]] = [{"a": [17, 23], "b": [25]}, {"a": [23, 29]}, {"a": [20]}]
    assert nearest(C, older, there) == {"a": 23}, "b's of 25 is further away than the 16 of the checkpoint"


@given(
    older=st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(1, C - 1)), min_size=1, max_size=3),
    there=st.lists(
        st.dictionaries(st.sampled_from("ab"), st.lists(st.integers(1, 2 * C), max_size=3)), min_size=3, max_size=3
    ),
)
def test_nothing_is_taken_that_a_holder_lacks_or_that_is_further_away(
    older: list[dict[str, int]], there: list[dict[str, list[int]]]
) -> None:
    for name, at in nearest(C, older, there).items():
        holders = [rank for rank, part in enumerate(older) if name in part]
        assert holders
        for rank in holders:
            assert at in there[rank][name]
        assert abs(C - at) < C - min(older[rank][name] for rank in holders)
