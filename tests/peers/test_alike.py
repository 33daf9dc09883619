"""Ranks that own the same: what one keeps beside another's tensors, and what commits say of whether they do."""

import threading
from pathlib import Path

import pytest
import torch

from cpsr.benchmarks.harness.checkpoint_files import commit_file, record_files
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.host_snapshot import WHOLE, Contents
from cpsr.checkpoint.memory_states import load_states
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CheckpointError
from cpsr.peers.alike import SmallStates, committed_words
from tests.checkpoint.conftest import refuse_asking
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


def commit(run_dir: Path, iteration: int, alike: tuple[bool, ...], experts: bool = False) -> Path:
    """A checkpoint of as many ranks, all of it in files of experts or nothing; its directory."""
    stores = [CheckpointStore(run_dir, rank, len(alike), RUN_ID, 1) for rank in range(len(alike))]
    for rank, store in enumerate(stores):
        part = shard(rank, iteration, ELEMENTS, alike=alike[rank])
        units = frozenset(part.operators)
        contents = Contents.sparse(units, units) if experts else WHOLE
        store.write(Snapshot(iteration, part, {"origin": "trained"}, contents=contents))
    assert stores[0].commit(iteration, 5.0, threading.Event()).committed
    return run_dir / "checkpoints" / f"step-{iteration:010d}"


@pytest.mark.parametrize("experts", [False, True])
def test_of_ranks_that_committed_the_same_the_words_are_equal(tmp_path: Path, experts: bool) -> None:
    assert committed_words(tmp_path / "checkpoints", 0, 1) is None
    commit(tmp_path, 10, (True, True, False), experts)
    words = committed_words(tmp_path / "checkpoints", 0, 1, 2)
    assert words is not None
    assert words[0] == words[1] != words[2]
    commit(tmp_path, 20, (True, False, True), experts)  # the newest counts
    words = committed_words(tmp_path / "checkpoints", 0, 1, 2)
    assert words is not None
    assert words[0] == words[2] != words[1]


def test_an_older_one_does_not_stand_for_one_that_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 10, (True, True))
    refused = commit_file(commit(tmp_path, 20, (True, False)))
    refuse_asking(monkeypatch, refused, 1_000)
    assert committed_words(tmp_path / "checkpoints", 0, 1) is None


def test_older_ones_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A history has hundreds, and this is asked before each replica."""
    refused = commit_file(commit(tmp_path, 10, (True, False)))
    commit(tmp_path, 20, (True, True))
    refuse_asking(monkeypatch, refused, 1_000)
    words = committed_words(tmp_path / "checkpoints", 0, 1)
    assert words is not None
    assert words[0] == words[1]


def test_of_a_damaged_one_nothing_is_known(tmp_path: Path) -> None:
    for path in record_files(commit(tmp_path, 10, (True, True))):
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        assert committed_words(tmp_path / "checkpoints", 0, 1) is None, path
        path.write_bytes(content)
    assert committed_words(tmp_path / "checkpoints", 0, 1) is not None


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
