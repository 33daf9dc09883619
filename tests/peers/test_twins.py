"""What committed checkpoints say of ranks that may hold the same."""

import threading
from pathlib import Path

import pytest

from cpsr.checkpoint.contents import Contents
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.peers.twins import Twins
from tests.peers.states import RUN_ID, shard

ELEMENTS = 100


def commit(run_dir: Path, iteration: int, alike: tuple[bool, ...]) -> Path:
    """A checkpoint of as many ranks; its directory."""
    stores = [CheckpointStore(run_dir, rank, len(alike), RUN_ID, 1, fsync=False) for rank in range(len(alike))]
    for rank, store in enumerate(stores):
        rank_shard = shard(rank, iteration, ELEMENTS, alike=alike[rank])
        store.write(Snapshot(iteration, rank_shard, {"origin": "trained"}))
    assert stores[0].commit(iteration, 5.0, threading.Event()).committed
    return run_dir / "checkpoints" / f"step-{iteration:010d}"


def test_of_ranks_that_committed_the_same_the_words_are_equal(tmp_path: Path) -> None:
    twins = Twins(tmp_path / "checkpoints")
    assert twins.words(0, 1) is None
    commit(tmp_path, 10, (True, True, False))
    words = twins.words(0, 1, 2)
    assert words is not None
    assert words[0] == words[1] != words[2]


@pytest.mark.parametrize("alike", [True, False])
def test_experts_in_files_of_their_own_count(tmp_path: Path, alike: bool) -> None:
    stores = [CheckpointStore(tmp_path, rank, 2, RUN_ID, 1, fsync=False) for rank in (0, 1)]
    for rank, store in enumerate(stores):
        rank_shard = shard(rank, 10, ELEMENTS, alike=alike)
        experts = frozenset(rank_shard.operators)
        store.write(Snapshot(10, rank_shard, {"origin": "trained"}, contents=Contents.sparse(experts, experts)))
    assert stores[0].commit(10, 5.0, threading.Event()).committed
    words = Twins(tmp_path / "checkpoints").words(0, 1)
    assert words is not None
    assert (words[0] == words[1]) is alike


def test_the_newest_checkpoint_counts(tmp_path: Path) -> None:
    twins = Twins(tmp_path / "checkpoints")
    commit(tmp_path, 10, (True, True))
    before = twins.words(0)
    commit(tmp_path, 20, (True, False))
    words = twins.words(0, 1)
    assert words is not None
    assert words[0] != words[1]
    assert [words[0]] != before


@pytest.mark.parametrize("name", ["manifest.json", "rank-00001.json", "COMMIT"])
def test_of_a_damaged_one_nothing_is_known(tmp_path: Path, name: str) -> None:
    path = commit(tmp_path, 10, (True, True)) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert Twins(tmp_path / "checkpoints").words(0, 1) is None
