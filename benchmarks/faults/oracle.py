"""The judge: a new start of the job opens the run directory, and says whether what was promised is there."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsr.benchmarks.faults.job import (
    INTERVAL,
    KEEP_ALL,
    RANKS,
    commit,
    frozen_bits,
    open_run,
    same_bits,
    scalars_of,
    shard_of,
    spoil,
)
from cpsr.benchmarks.harness.checkpoint_files import listed_anyhow
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.manifest import SLABS
from cpsr.checkpoint.store import CheckpointStore, verify_run
from cpsr.errors import CheckpointError, CPSRError, RunMismatchError
from cpsr.state.shard import Shard

__all__ = ["FOREIGN", "Verdict", "is_right", "restart"]

LIFE = 9  # later than any life in which a fault happens
COMMITS_TO_REMOVE = 2  # after which what was set aside before is gone
FOREIGN = 10_001  # an iteration that no test saves, so that nothing that was never loaded looks as if it had been


@dataclass(frozen=True)
class Verdict:
    """Whether the job came back, and with the bits that were saved.

    Attributes:
        survived: the newest checkpoint is one of those promised, nothing else is missing, saving goes on, and then
            there are the slabs that something lists, and no others.
        state_equal: what could be loaded is bit for bit what was saved.
        seconds: wall time of the restart with its first save.
        what: what is wrong, empty where nothing is.
    """

    survived: bool
    state_equal: bool
    seconds: float
    what: str


def restart(run_dir: Path, newest: Collection[int], kept: Collection[int] = (), *, damaged: bool = False) -> Verdict:
    """Open the run as a restarted job does, load the newest checkpoint on every rank, and commit the next ones.

    Args:
        run_dir: the run.
        newest: iterations of which one has to be the newest that loads; empty where nothing may be left.
        kept: iterations of whole checkpoints that all have to be there.
        damaged: files were damaged, so that checkpoints may be refused; after a mere kill none may be.
    """
    started = time.perf_counter()
    wrong: list[str] = []
    equal = True
    before = _slabs_in(run_dir)
    try:
        stores = open_run(run_dir, LIFE)
        refused = [f"{problem.file}: {problem.what}" for problem in stores[0].prepare()]
        found = None
        for iteration in reversed(_whole(stores[0])):
            problem = _load(stores, iteration)
            if problem is None:
                found = iteration
                break
            equal &= "differs" not in problem
            refused.append(problem)
            stores[0].quarantine(iteration, problem)
        if refused and not damaged:
            wrong += refused
        if found not in (newest or (None,)):
            wrong.append(f"the newest checkpoint that loads is {found}, promised was one of {sorted(newest)}")
        missing = sorted(set(kept) - set(_whole(stores[0])))
        if missing:
            wrong.append(f"the checkpoints {missing} are gone")
        for iteration in _whole(stores[0]):
            problem = _load(stores, iteration)
            if problem is not None and (not damaged or "differs" in problem):
                equal = False
                wrong.append(problem)
        wrong += _goes_on(stores, run_dir, before if damaged else None)
    except (CPSRError, OSError) as error:
        wrong.append(f"the restart ended with {type(error).__name__}: {error}")
    return Verdict(not wrong, equal, time.perf_counter() - started, "; ".join(wrong))


def is_right(rank: int, iteration: int, found: Shard, scalars: Any) -> bool:
    """Whether a rank's part of a checkpoint, as it was loaded, is bit for bit what was saved.

    The experts of a sparse one are those of the iterations that the job itself noted, and say so.
    """
    meant = {name: scalars[name] for name in ("ages", "frozen") if name in scalars}
    ages = {name: operator.iteration for name, operator in found.operators.items()}
    saved = {name: shard_of(rank, age).operators[name] for name, age in ages.items()}
    return (
        ages == dict.fromkeys(ages, iteration) | meant.get("ages", {})
        and scalars == scalars_of(iteration) | meant
        and same_bits(found, Shard(saved, shard_of(rank, iteration).others))
    )


def _whole(store: CheckpointStore) -> list[int]:
    return [info.iteration for info in store.catalogue() if info.full]


def _load(stores: list[CheckpointStore], iteration: int) -> str | None:
    """What is wrong with a checkpoint, None where it is bit for bit what was saved."""
    for rank in range(RANKS):
        shard = shard_of(rank, FOREIGN)
        spoil(stores[rank])
        try:
            scalars = stores[rank].load(iteration, shard)
        except (CheckpointError, RunMismatchError) as error:
            return f"checkpoint {iteration} of rank {rank} is refused: {error}"
        if not is_right(rank, iteration, shard, scalars) or not frozen_bits(stores[rank], iteration):
            return f"checkpoint {iteration} of rank {rank} differs from what was saved"
    return None


def _goes_on(stores: list[CheckpointStore], run_dir: Path, there_before: set[str] | None) -> list[str]:
    """What is wrong with the saves after the restart; see `_wrong_slabs`."""
    wrong = []
    for _ in range(COMMITS_TO_REMOVE):
        wrong += _saves_again(stores, run_dir, damaged=there_before is not None)
        wrong += _wrong_slabs(stores[0], there_before)
    asides = scan(stores[0].directory).asides
    return wrong + [f"{aside.directory} stays, although later checkpoints are committed" for aside in asides]


def _saves_again(stores: list[CheckpointStore], run_dir: Path, *, damaged: bool) -> list[str]:
    """What is wrong with a save after the restart, with its retention pass."""
    following = max((info.iteration for info in stores[0].catalogue()), default=0) + INTERVAL
    commit(stores, following)
    stores[0].retain(KEEP_ALL)
    problem = _load(stores, following)
    left = [f"{problem.file}: {problem.what}" for problem in verify_run(run_dir)]
    return ([problem] if problem else []) + ([] if damaged else left)


def _slabs_in(run_dir: Path) -> set[str]:
    """Names of all that lies among the slabs, whatever it is."""
    return {path.name for path in (run_dir / "checkpoints" / SLABS).iterdir()}


def _wrong_slabs(store: CheckpointStore, there_before: set[str] | None) -> list[str]:
    """What is wrong among the slabs after a retention pass.

    Args:
        store: of a rank.
        there_before: what lay there before the restart, where it was damaged: what was set aside may lack the rest.
    """
    there, committed = _slabs_in(store.directory.parent), {info.directory for info in store.catalogue()}
    listed = {path: listed_anyhow(path) for path in store.directory.iterdir() if path.name != SLABS}
    kept = {name for directory in committed for name in listed[directory]}
    other = {name for directory in listed.keys() - committed for name in listed[directory]}
    if there_before is not None:
        other &= there_before
    wrong = [f"the slab {name} stays, which nothing lists" for name in sorted(there - kept - other)]
    return wrong + [f"the slab {name} is gone, which is still listed" for name in sorted((kept | other) - there)]
