"""The job whose checkpoints meet the faults: two ranks with small tensors that follow from rank and iteration."""

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from cpsr.benchmarks.faults.frozen import freeze, frozen_scalars
from cpsr.checkpoint.commit import Missing
from cpsr.checkpoint.retention import Retention
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError
from cpsr.state.shard import OperatorState, ParamSlice, Shard

__all__ = ["COMMITTED", "INTERVAL", "KEEP_ALL", "RANKS", "RUN_ID", "commit", "commit_snapshots", "copy_run", "open_run"]
__all__ += ["same_bits", "scalars_of", "shard_of", "snapshot_of", "write_run"]

RANKS = 2
RUN_ID = "faults"
INTERVAL = 10
COMMITTED = (10, 20, 30, 40)  # what a run holds before a fault
KEEP_ALL = Retention(full_checkpoints=100)
COMMIT_TIMEOUT_SECONDS = 20.0
OTHER_SEED = 1_000_000  # the generator takes no more than 32 bits
SIZES = (5, 0, 200, 9)  # elements of each operator's slice: none on this rank is among them


def shard_of(rank: int, iteration: int, run_id: str = RUN_ID) -> Shard:
    """Weights of several dtypes, the moments of AdamW, and buffers; in another run they have other values."""
    generator = torch.Generator().manual_seed(iteration * RANKS + rank + (0 if run_id == RUN_ID else OTHER_SEED))
    operators = {}
    for index, size in enumerate(SIZES):
        dtype = torch.bfloat16 if index == 0 else torch.float32
        weights = torch.randn(size, generator=generator).to(dtype)
        moments = {name: torch.randn(size, generator=generator) for name in ("exp_avg", "exp_avg_sq")}
        name = f"layers.{index}.weight"
        operators[name] = OperatorState(name, ParamSlice(weights, (RANKS * size,), rank * size), moments, iteration)
    others = {"seen": torch.tensor(iteration), "running_mean": torch.randn(3, generator=generator)}
    return Shard(operators, others)


def scalars_of(iteration: int) -> dict[str, object]:
    """The small state."""
    rate = 1e-3
    return {
        "step": iteration,
        "cumulative_learning_rate": iteration * rate,
        "learning_rate": rate,
        "origin": "trained",
    }


def snapshot_of(rank: int, iteration: int, run_id: str = RUN_ID) -> Snapshot:
    """A snapshot outside any pool."""
    return Snapshot(iteration, shard_of(rank, iteration, run_id), scalars_of(iteration))


def open_run(run_dir: Path, life: int, run_id: str = RUN_ID, missing: Missing | None = None) -> list[CheckpointStore]:
    """The store of each rank."""
    stores = [CheckpointStore(run_dir, rank, RANKS, run_id, life, missing=missing) for rank in range(RANKS)]
    for store in stores:
        freeze(run_dir, store)
    return stores


def commit(stores: Sequence[CheckpointStore], iteration: int, run_id: str = RUN_ID) -> None:
    """One whole save by all ranks.

    Raises:
        CPSRError: it was not committed.
    """
    snapshots = [snapshot_of(store.rank, iteration, run_id) for store in stores]
    for store, snapshot in zip(stores, snapshots, strict=True):
        snapshot.scalars |= frozen_scalars(store, iteration)
    commit_snapshots(stores, snapshots)


def commit_snapshots(stores: Sequence[CheckpointStore], snapshots: Sequence[Snapshot]) -> None:
    """One save of these by all ranks.

    Raises:
        CPSRError: it was not committed.
    """
    for store, snapshot in reversed(list(zip(stores, snapshots, strict=True))):
        store.write(snapshot)
    iteration = snapshots[0].iteration
    result = stores[0].commit(iteration, COMMIT_TIMEOUT_SECONDS, threading.Event())
    if not result.committed:
        raise CPSRError(f"checkpoint {iteration} was not committed: {result.reason}")


def write_run(run_dir: Path, run_id: str = RUN_ID) -> None:
    """A run in its first life, with four whole checkpoints."""
    stores = open_run(run_dir, 1, run_id)
    stores[0].prepare()
    for iteration in COMMITTED:
        commit(stores, iteration, run_id)


def copy_run(run_dir: Path, target: Path) -> None:
    """Copy a run; files that checkpoints share under several names are shared by the copies, too."""
    copied: dict[int, str] = {}

    def copy(source: str, destination: str) -> str:
        first = copied.setdefault(Path(source).stat().st_ino, destination)
        if first == destination:
            return shutil.copy2(source, destination)
        os.link(first, destination)
        return destination

    shutil.copytree(run_dir, target, copy_function=copy)


def same_bits(found: Shard, expected: Shard) -> bool:
    """Whether every byte of every tensor is the same."""
    left, right = dict(found.tensors()), dict(expected.tensors())
    return left.keys() == right.keys() and all(
        tensor.dtype == right[key].dtype
        and tensor.shape == right[key].shape
        and torch.equal(tensor.reshape(-1).view(torch.uint8), right[key].reshape(-1).view(torch.uint8))
        for key, tensor in left.items()
    )
