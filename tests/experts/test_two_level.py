"""Two levels: what is copied to host memory beside what goes to the disk."""

from hypothesis import given
from hypothesis import strategies as st

from cpsr.experts.budget import Budget
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.load_aware import LoadAware
from cpsr.experts.operators import Expert
from cpsr.experts.popularity import Popularity
from cpsr.experts.two_level import copied_with
from cpsr.experts.unsaved import UnsavedTokens
from tests.experts.mixtures import load, loads, mixture, mixtures, no_load


def popularity_of(ledger: UnsavedTokens) -> Popularity:
    return Popularity(ledger.tokens, ledger.tokens, ledger.ages)


def experts(layers: tuple[ExpertLayer, ...]) -> list[Expert]:
    return [Expert(place, index) for place, layer in enumerate(layers) for index in range(layer.experts)]


def test_host_memory_takes_what_it_lacks_most_beside_what_goes_to_the_disk() -> None:
    layers = mixture(4, expert_bytes=10)
    found = copied_with([Expert(0, 3)], layers, load([9, 2, 7, 0]), 30)
    assert found == {Expert(0, 3), Expert(0, 0), Expert(0, 2)}


def test_the_oldest_come_first_where_no_token_was_routed() -> None:
    layers = mixture(3, expert_bytes=10)
    assert copied_with([], layers, load([0, 0, 0], ages=[[1, 5, 2]]), 10) == {Expert(0, 1)}


def test_as_many_as_one_iteration_overlaps() -> None:
    layers = mixture(8, 8, expert_bytes=10)
    overlapped = Budget.of_link(100, 0.7, non_expert_bytes=5).expert_bytes
    assert len(copied_with([Expert(0, 0)], layers, no_load(layers), overlapped)) == 6


def test_each_rank_has_a_link_of_its_own() -> None:
    layers = mixture(4, ranks=2, expert_bytes=10)  # 0 and 1 lie on the first rank
    found = copied_with([Expert(0, 0)], layers, load([5, 5, 1, 2]), 10)
    assert found == {Expert(0, 0), Expert(0, 3)}


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[ExpertLayer, ...], list[Expert], Popularity, float]:
    layers = draw(mixtures())
    persisted = draw(st.lists(st.sampled_from(experts(layers)), unique=True))
    return layers, persisted, draw(loads(layers)), draw(st.floats(0, 200))


@given(cases())
def test_what_goes_to_the_disk_is_always_copied_and_nothing_else_beyond_the_link(
    case: tuple[tuple[ExpertLayer, ...], list[Expert], Popularity, float],
) -> None:
    layers, persisted, in_memory, overlapped_bytes = case
    found = copied_with(persisted, layers, in_memory, overlapped_bytes)
    assert set(persisted) <= found <= set(experts(layers))
    for rank in range(layers[0].expert_parallel.size):
        own = [one for one in found if layers[one.layer].owner(one.index) == rank]
        bytes_ = sum(layers[one.layer].expert_bytes for one in own)
        assert bytes_ <= overlapped_bytes or set(own) <= set(persisted)
        left = [one for one in experts(layers) if layers[one.layer].owner(one.index) == rank and one not in found]
        assert all(bytes_ + layers[one.layer].expert_bytes > overlapped_bytes for one in left)


@given(mixtures(), st.integers(1, 5), st.floats(0, 100))
def test_every_expert_comes_to_host_memory_in_the_end(
    layers: tuple[ExpertLayer, ...], count: int, overlapped_bytes: float
) -> None:
    policy, memory, disk = LoadAware(layers), UnsavedTokens(layers), UnsavedTokens(layers)
    seen: set[Expert] = set()
    for step in range(sum(layer.experts for layer in layers)):
        persisted = policy.select(step, popularity_of(disk), Budget(experts_per_layer=count))
        copied = copied_with(persisted, layers, popularity_of(memory), overlapped_bytes)
        memory.saved(copied)
        disk.saved(persisted)
        seen |= copied
    assert seen == set(experts(layers))
