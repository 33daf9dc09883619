"""Who owns which experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import ExpertLayer, ExpertParallel
from cpsr.errors import ConfigError


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1), (-1, 0)])
def test_a_rank_that_the_group_does_not_have_is_refused(size: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"has no rank {rank}"):
        ExpertParallel(size, rank)


def test_a_group_that_cannot_share_the_experts_is_refused_with_the_sizes_that_can() -> None:
    with pytest.raises(ConfigError, match=r"'blocks.1' has 6 experts, which 4 .* 1, 2, 3, 6"):
        ExpertLayer("blocks.1", 6, 10, ExpertParallel(4))


@pytest.mark.parametrize(("experts", "size"), [(0, 10), (-2, 10), (2, 0)])
def test_a_layer_needs_experts_of_some_size(experts: int, size: int) -> None:
    with pytest.raises(ConfigError, match="at least one expert"):
        ExpertLayer("blocks.1", experts, size)


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_expert_has_one_owner_and_one_turn(ranks: int, per_rank: int) -> None:
    experts = ranks * per_rank
    layers = [ExpertLayer("moe", experts, 1, ExpertParallel(ranks, rank)) for rank in range(ranks)]
    assert [index for layer in layers for index in layer.owned] == list(range(experts))
    assert all(layers[0].owner(index) == rank for rank, layer in enumerate(layers) for index in layer.owned)
    turns = [layers[0].in_turn(position) for position in range(5, 5 + experts)]
    assert sorted(turns) == list(range(experts))
    assert [layers[0].owner(index) for index in turns] == [position % ranks for position in range(5, 5 + experts)]
