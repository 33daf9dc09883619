"""Adaptive sharding: everything once, within its bound of the best, alike on every rank."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.engines.moe.operators import Expert
from cpsr.experts.sharding import adaptive_sharding, equal_sharding, expert_bytes_by_rank
from tests.engines.moe.mixtures import mixture

PARTS = st.lists(st.integers(0, 50), max_size=6).map(
    lambda sizes: {f"part{place}": size for place, size in enumerate(sizes)}
)
EXPERTS = st.lists(st.integers(0, 60), min_size=1, max_size=3)


def best(parts: dict[str, int], experts: list[int]) -> int:
    """The smallest largest sum of a rank, of all ways there are."""
    found = []
    for ranks in product(range(len(experts)), repeat=len(parts)):
        sums = list(experts)
        for rank, size in zip(ranks, parts.values(), strict=True):
            sums[rank] += size
        found.append(max(sums))
    return min(found)


def test_ranks_without_experts_take_the_large_parts() -> None:
    found = adaptive_sharding({"norm": 1, "head": 50, "embedding": 50, "attention": 20}, [60, 0, 0])
    assert found.parts == ((), ("head", "attention"), ("embedding", "norm"))
    assert found.rank_bytes == (60, 70, 51)


@given(PARTS, EXPERTS)
def test_every_part_is_saved_once_and_counted(parts: dict[str, int], experts: list[int]) -> None:
    for sharding in (adaptive_sharding(parts, experts), equal_sharding(parts, experts)):
        assert sorted(name for own in sharding.parts for name in own) == sorted(parts)
        for own, own_experts, size in zip(sharding.parts, experts, sharding.rank_bytes, strict=True):
            assert size == own_experts + sum(parts[name] for name in own)


@given(PARTS, EXPERTS)
def test_it_is_within_its_bound_of_the_best(parts: dict[str, int], experts: list[int]) -> None:
    ranks = len(experts)
    assert max(adaptive_sharding(parts, experts).rank_bytes) <= (3 / 2 - 1 / (2 * ranks)) * best(parts, experts)
    alike = [experts[0]] * ranks
    assert max(adaptive_sharding(parts, alike).rank_bytes) <= (4 / 3 - 1 / (3 * ranks)) * best(parts, alike) + 1e-9


@given(PARTS, st.lists(st.just(7), min_size=1, max_size=3))
def test_with_equal_experts_it_is_equal_sharding(parts: dict[str, int], experts: list[int]) -> None:
    assert adaptive_sharding(parts, experts) == equal_sharding(parts, experts)


def test_the_experts_of_each_rank() -> None:
    layers = mixture(4, 2, ranks=2, expert_bytes=10)
    assert expert_bytes_by_rank(layers, [Expert(0, 0), Expert(0, 1), Expert(1, 1), Expert(0, 3)]) == [20, 20]
    assert expert_bytes_by_rank(layers, []) == [0, 0]


def test_nothing_to_save() -> None:
    assert adaptive_sharding({}, [3, 4]).rank_bytes == (3, 4)


@pytest.mark.parametrize(("parts", "experts"), [({"a": 1}, []), ({"a": -1}, [0]), ({"a": 1}, [-1])])
def test_no_ranks_and_sizes_below_zero_are_refused(parts: dict[str, int], experts: list[int]) -> None:
    with pytest.raises(ValueError, match="needs a rank"):
        adaptive_sharding(parts, experts)
