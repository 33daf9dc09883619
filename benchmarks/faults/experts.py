"""The job as a mixture of experts: three of its operators are experts, and most of its checkpoints save one of them."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.job import COMMITTED, RUN_ID, commit_snapshots, open_run, scalars_of, shard_of
from cpsr.checkpoint.commit import Missing
from cpsr.checkpoint.contents import Contents
from cpsr.checkpoint.snapshot import Snapshot
from cpsr.checkpoint.store import CheckpointStore
from cpsr.engines.moe.operators import PatternNaming
from cpsr.experts.completeness import wrong_experts

__all__ = ["ALL", "EXPERTS", "SparseSave", "chain", "open_sparse", "sparse_scalars", "sparse_snapshot", "write_sparse"]

# The second has no element on either rank; the fourth operator is what every token passes.
EXPERTS = tuple(f"layers.{index}.weight" for index in range(3))
ALL = range(len(EXPERTS))
_NAMING = PatternNaming(re.compile(r"(?P<layer>layers)\.(?P<index>[0-2])\."))
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
