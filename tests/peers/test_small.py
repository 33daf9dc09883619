"""A rank's own state and another's tensors make it whole again."""

from pathlib import Path

import pytest
import torch

from cpsr.checkpoint.memory_reader import load_memory_state
from cpsr.checkpoint.memory_states import memory_states
from cpsr.errors import CheckpointError
from cpsr.peers.small import SmallStates, fingerprint, load_together
from tests.peers.states import RUN_ID, States, shard

ELEMENTS = 1000


def test_a_small_state_and_the_tensors_of_another_rank(tmp_path: Path) -> None:
    mine, other = (States(tmp_path, rank, ELEMENTS, alike=True) for rank in (0, 1))
    small = SmallStates(mine.memory, mine.template)
    for iteration in (10, 20, 30):
        _, snapshot = mine.seal(iteration)
        path = small.seal(snapshot)
        other.seal(iteration)
    small_state = next(state for state in memory_states(RUN_ID, tmp_path) if state.path == path)
    tensors = next(state for state in memory_states(RUN_ID, tmp_path) if (state.rank, state.iteration) == (1, 30))
    into = shard(0, -1, ELEMENTS, alike=True)
    assert load_together(small_state, tensors, into) == {"of": [0, 30]}
    for (key, found), (_, expected) in zip(into.tensors(), shard(0, 30, ELEMENTS, alike=True).tensors(), strict=True):
        assert torch.equal(found, expected), key
    kept = [state for state in memory_states(RUN_ID, tmp_path) if str(state.kind) == "small"]
    assert [state.iteration for state in kept] == [20, 30]
    assert small_state in kept
    with pytest.raises(CheckpointError, match="param/weight as nothing"):  # it is no state to go on from alone
        load_memory_state(small_state, into)
    small.close(remove=True)
    assert not list(tmp_path.glob("*small*"))


def test_fingerprints_distinguish_slices_and_not_ranks() -> None:
    alike = {fingerprint(shard(rank, rank, ELEMENTS, alike=True)) for rank in range(3)}
    assert len(alike) == 1
    slices = {fingerprint(shard(rank, 0, ELEMENTS)) for rank in range(3)}
    assert len(slices) == 3
    assert fingerprint(shard(0, 0, ELEMENTS + 1)) not in slices
