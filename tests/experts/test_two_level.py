"""Two levels: what goes on to the disk, and what a failure then takes."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsr.errors import ConfigError
from cpsr.experts.budget import Budget
from cpsr.experts.layers import ExpertLayer
from cpsr.experts.load_aware import LoadAware
from cpsr.experts.operators import Expert
from cpsr.experts.popularity import Popularity
from cpsr.experts.sequential import Sequential
from cpsr.experts.two_level import TwoLevel, lost_in_two_levels
from cpsr.experts.unsaved import UnsavedTokens
from tests.experts.mixtures import load, mixture, mixtures, no_load


def popularity_of(ledger: UnsavedTokens) -> Popularity:
    return Popularity(ledger.tokens, ledger.tokens, ledger.ages)


def test_the_disk_takes_the_one_of_the_snapshot_that_it_lacks_most() -> None:
    layers = mixture(4)
    policy = TwoLevel(layers, LoadAware(layers))
    found = policy.select(0, load([9, 8, 7, 0]), load([10, 90, 50, 99]), Budget(experts_per_layer=3))
    assert found.snapshot == (Expert(0, 0), Expert(0, 1), Expert(0, 2))
    assert found.persisted == (Expert(0, 1),)


def test_by_bytes_the_snapshot_takes_as_many_as_overlap() -> None:
    layers = mixture(8, 8, expert_bytes=10)
    found = TwoLevel(layers, Sequential(layers)).select(
        0, no_load(layers), no_load(layers), Budget.of_link(100, 0.7, non_expert_bytes=5)
    )
    assert len(found.snapshot) == 6
    assert len(found.persisted) == 2


def test_at_least_one_goes_to_the_disk() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        TwoLevel(mixture(2), Sequential(mixture(2)), 0)


@given(mixtures(), st.integers(1, 5), st.integers(1, 3))
def test_every_expert_comes_to_the_disk_in_the_end(
    layers: tuple[ExpertLayer, ...], count: int, persisted_count: int
) -> None:
    policy = TwoLevel(layers, Sequential(layers), persisted_count)
    memory, disk = UnsavedTokens(layers), UnsavedTokens(layers)
    persisted: set[Expert] = set()
    most = max(layer.experts for layer in layers)
    for step in range(most * most):
        found = policy.select(step, popularity_of(memory), popularity_of(disk), Budget(experts_per_layer=count))
        assert set(found.persisted) <= set(found.snapshot)
        memory.saved(expert for expert in found.snapshot if isinstance(expert, Expert))
        disk.saved(found.persisted)
        persisted.update(found.persisted)
    assert len(persisted) == sum(layer.experts for layer in layers)


def test_ranks_that_live_lose_what_their_memory_lacks_and_others_what_the_disk_does() -> None:
    layers = mixture(4, 2, ranks=2)
    lost = lost_in_two_levels(
        layers,
        (numpy.array([1.0, 2, 3, 4]), numpy.array([5.0, 6])),
        (numpy.array([10.0, 20, 30, 40]), numpy.array([50.0, 60])),
        failed_ranks={1},
    )
    assert [layer.tolist() for layer in lost] == [[1, 2, 30, 40], [5, 60]]
