"""A run of two ranks whose tensors follow from rank and iteration."""

import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.state.shard import Shard
from tests.checkpoint.conftest import make_shard

RANKS = 2
COMMITTED = (10, 20, 30, 40)
NEWEST = COMMITTED[-1]
FOREIGN = 10_001  # an iteration that no test saves


def shard_of(rank: int, iteration: int) -> Shard:
    return make_shard(iteration * RANKS + rank, iteration=iteration)


def open_run(run_dir: Path, life: int) -> list[CheckpointStore]:
    """The store of each rank."""
    return [CheckpointStore(run_dir, rank, RANKS, "faults", life) for rank in range(RANKS)]


def commit(stores: Sequence[CheckpointStore], iteration: int) -> None:
    """One whole save by all ranks."""
    rate = 1e-3
    for store in reversed(stores):
        scalars = {"step": iteration, "cumulative_learning_rate": iteration * rate, "learning_rate": rate}
        store.write(Snapshot(iteration, shard_of(store.rank, iteration), scalars | {"origin": "trained"}))
    assert stores[0].commit(iteration, 20.0, threading.Event()).committed


def write_run(run_dir: Path) -> None:
    """A run in its first life, with four whole checkpoints."""
    stores = open_run(run_dir, 1)
    stores[0].prepare()
    for iteration in COMMITTED:
        commit(stores, iteration)


def is_same(found: Shard, expected: Shard) -> bool:
    """Whether every byte of every tensor is the same."""
    left, right = dict(found.tensors()), dict(expected.tensors())
    return left.keys() == right.keys() and all(
        tensor.dtype == right[key].dtype
        and tensor.shape == right[key].shape
        and torch.equal(
            tensor.contiguous().reshape(-1).view(torch.uint8), right[key].contiguous().reshape(-1).view(torch.uint8)
        )
        for key, tensor in left.items()
    )
