"""Ranks that own the same: what one keeps beside another's tensors."""

from pathlib import Path

import pytest
import torch

from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.memory_states import load_states
from cpsr.errors import CheckpointError
from cpsr.peers.small_states import SmallStates
from tests.peers.states import RUN_ID, States, shard

ELEMENTS = 100


def test_a_small_state_and_the_tensors_of_another_rank(tmp_path: Path) -> None:
    mine, other = (States(tmp_path, rank, ELEMENTS, alike=True) for rank in (0, 1))
    small = SmallStates(mine.memory, mine.template)
    for iteration in (10, 20, 30):
        path = small.seal(mine.image(iteration)).path
        other.seal(iteration)
    states = Arena(RUN_ID, tmp_path).list()
    small_state = next(state for state in states if state.path == path)
    tensors = next(state for state in states if (state.rank, state.iteration) == (1, 30))
    into = shard(0, -1, ELEMENTS, alike=True)
    assert load_states([tensors, small_state], into) == {"of": [0, 30]}
    for (key, found), (_, expected) in zip(into.tensors(), shard(0, 30, ELEMENTS, alike=True).tensors(), strict=True):
        assert torch.equal(found, expected), key
    assert [state.iteration for state in states if str(state.kind) == "small"] == [20, 30]
    with pytest.raises(CheckpointError, match="another slice of weight"):  # it is no state to go on from alone
        load_states([small_state], into)
    small.close(remove=True)
    assert not list(tmp_path.glob("*small*"))


def test_a_buffer_that_a_small_state_lacks_is_not_another_ranks(tmp_path: Path) -> None:
    mine, other = (States(tmp_path, rank, ELEMENTS, alike=True) for rank in (0, 1))
    path = SmallStates(mine.memory, mine.template).seal(mine.image(10)).path
    other.seal(10)
    states = Arena(RUN_ID, tmp_path).list()
    small_state = next(state for state in states if state.path == path)
    tensors = next(state for state in states if (state.rank, state.iteration) == (1, 10))
    into = shard(0, -1, ELEMENTS, alike=True)
    into.others["more"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match="holds no other/more"):
        load_states([tensors, small_state], into)
