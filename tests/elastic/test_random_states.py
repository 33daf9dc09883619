"""New ranks draw numbers of their own, and always the same ones."""

import itertools
from typing import Any

import torch

from cpsr.elastic.resharded_load import random_states_of
from cpsr.state.codec import same
from cpsr.state.host_random import restore_host_rng
from cpsr.state.small_state import capture_rng


def states(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {**capture_rng(), "cuda": [torch.zeros(16, dtype=torch.uint8)], "engine": {"own": 1}}


def test_a_rank_that_was_there_keeps_its_own() -> None:
    kept = states(1)
    assert random_states_of(1, 1, kept) is kept


def test_further_ranks_have_states_of_their_own_that_follow_from_the_saved_ones() -> None:
    saved = states(1)
    found = [random_states_of(rank, rank % 2, saved) for rank in range(2, 6)]
    for one, other in itertools.combinations([saved, *found], 2):
        for kind in ("python", "numpy", "torch"):
            assert not same(one["host"][kind], other["host"][kind])
        assert not same(one["cuda"], other["cuda"])
    assert same(found, [random_states_of(rank, rank % 2, states(1)) for rank in range(2, 6)])
    assert not same(found, [random_states_of(rank, rank % 2, states(2)) for rank in range(2, 6)])
    assert all(one["engine"] == saved["engine"] for one in found)
    assert all(one["cuda"][0].shape == (16,) for one in found)


def test_they_can_be_restored() -> None:
    found = random_states_of(3, 1, states(1))
    restore_host_rng(found["host"])
    first = torch.rand(3)
    restore_host_rng(found["host"])
    assert torch.equal(first, torch.rand(3))
