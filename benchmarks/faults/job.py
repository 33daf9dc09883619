"""The job whose checkpoints meet the faults: two ranks with small tensors that follow from rank and iteration.

Some runs have frozen weights, whose file their checkpoints share until the run merges something into them. In others
three operators are experts, and most checkpoints save one of them.
"""

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpsr.checkpoint.catalogue import Retention
from cpsr.checkpoint.commit import Missing
from cpsr.checkpoint.frozen_files import FrozenFiles
from cpsr.checkpoint.host_snapshot import Contents
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import CPSRError
from cpsr.experts.completeness import wrong_experts
from cpsr.state.frozen_parameters import FrozenWeights
from cpsr.state.shard import OperatorState, ParamSlice, Shard

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


def same_bits(found: Shard, expected: Shard) -> bool:
    """Whether every byte of every tensor is the same."""
    left, right = dict(found.tensors()), dict(expected.tensors())
    return left.keys() == right.keys() and all(
        tensor.dtype == right[key].dtype
        and tensor.shape == right[key].shape
        and torch.equal(tensor.reshape(-1).view(torch.uint8), right[key].reshape(-1).view(torch.uint8))
        for key, tensor in left.items()
    )


MERGED = 50  # from this iteration on the weights are others
_MARKER = "frozen"  # in the directory of a run with such weights
_SHAPES = {"base.0": (30,), "base.1": (4, 5)}
_Weights = dict[str, torch.Tensor]


def mark(run_dir: Path) -> None:
    """Make the run one with frozen weights, before it is opened."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / _MARKER).touch()


def freeze(run_dir: Path, store: CheckpointStore) -> None:
    """Give a rank of such a run its weights."""
    if (run_dir / _MARKER).exists():
        tensors = _weights(store.rank, 0)
        store.frozen = FrozenFiles(FrozenWeights(lambda: tensors), store.rank, store.directory)


def frozen_scalars(store: CheckpointStore, iteration: int) -> dict[str, Any]:
    """Give the rank the weights of an iteration; what a snapshot then has of them, empty in other runs."""
    if store.frozen is None:
        return {}
    for name, values in _weights(store.rank, iteration).items():
        store.frozen.weights.tensors[name].copy_(values)
    store.frozen.weights.settle(anew=True)
    return {"frozen": store.frozen.weights.state(whole=True)}


def spoil(store: CheckpointStore) -> None:
    """What a script may have that does not load the weights itself."""
    for values in {} if store.frozen is None else store.frozen.weights.tensors.values():
        values.fill_(-1.0)


def frozen_bits(store: CheckpointStore, iteration: int) -> bool:
    """Whether the rank has the weights of that iteration."""
    found: Any = {} if store.frozen is None else store.frozen.weights.tensors
    return all(torch.equal(values, _weights(store.rank, iteration)[name]) for name, values in found.items())


def _weights(rank: int, iteration: int) -> _Weights:
    generator = torch.Generator().manual_seed(2 * rank + (iteration >= MERGED))
    return {name: torch.randn(shape, generator=generator) for name, shape in _SHAPES.items()}


# The second has no element on either rank; the fourth operator is what every token passes.
EXPERTS = tuple(f"layers.{index}.weight" for index in range(3))
ALL = range(len(EXPERTS))
_NAMING = re.compile(r"(?P<layer>layers)\.(?P<index>[0-2])\.")
_WRONG: Missing = partial(wrong_experts, naming=_NAMING)


@dataclass(frozen=True)
class SparseSave:
    """What one checkpoint is to hold of the experts.

    Attributes:
        contents: of each rank's part.
        ages: the iteration at which each of them was saved last.
    """

    contents: Contents
    ages: Mapping[str, int]


def chain(choices: Mapping[int, Collection[int]]) -> dict[int, SparseSave]:
    """Sparse checkpoints by iteration, each of which carries along what it does not save.

    Args:
        choices: iteration -> numbers of the experts that it saves, ascending; the first saves all.
    """
    ages: dict[str, int] = {}
    saves = {}
    for iteration, numbers in choices.items():
        saved = frozenset(EXPERTS[number] for number in numbers)
        ages |= dict.fromkeys(saved, iteration)
        saves[iteration] = SparseSave(Contents.sparse(frozenset(EXPERTS), saved), dict(ages))
    return saves


# What a run holds before a fault: damage in what 40 carries along takes 30 and 20 with it, and leaves 10.
_WRITTEN = chain(dict(zip(COMMITTED, (ALL, ALL, [2], [0]), strict=True)))


def sparse_scalars(iteration: int, save: SparseSave) -> dict[str, Any]:
    """The small state, with the ages that the job means its experts to have: not taken from what the store says."""
    return scalars_of(iteration) | {"ages": dict(save.ages)}


def sparse_snapshot(rank: int, iteration: int, save: SparseSave, run_id: str = RUN_ID) -> Snapshot:
    """A snapshot outside any pool."""
    scalars = sparse_scalars(iteration, save)
    return Snapshot(iteration, shard_of(rank, iteration, run_id), scalars, contents=save.contents)


def open_sparse(run_dir: Path, life: int, run_id: str = RUN_ID) -> list[CheckpointStore]:
    """The store of each rank, which commits nothing where the ranks' experts do not fit together."""
    return open_run(run_dir, life, run_id, _WRONG)


def write_sparse(run_dir: Path, run_id: str = RUN_ID) -> None:
    """A run in its first life, with four checkpoints of which the last two are sparse."""
    stores = open_sparse(run_dir, 1, run_id)
    stores[0].prepare()
    for iteration, save in _WRITTEN.items():
        commit_snapshots(stores, [sparse_snapshot(store.rank, iteration, save, run_id) for store in stores])
