"""What a life has left behind, before the next one begins."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpsr.benchmarks.faults.part import RANKS
from cpsr.checkpoint.arena import Arena
from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.memory_owners import remove_memory_states
from cpsr.checkpoint.memory_states import SHARED_MEMORY, MemoryState, verify_memory_state
from cpsr.checkpoint.progress import newest_life, read_progress
from cpsr.checkpoint.run_directory import IDENTITY

__all__ = ["Remains", "remains_of", "remove_memory", "states_in"]


@dataclass(frozen=True)
class Remains:
    """What a restart can find.

    Attributes:
        committed: iterations of whole checkpoints.
        failure_iteration: the last step that every rank had finished, as its counters say; None without any.
        stored: rank and iteration of every whole state in memory.
        complete: iterations at which memory holds the whole state of all ranks with everything that belongs to it, of
            the life that trained last; or from which windows of all ranks lead to one.
    """

    committed: frozenset[int]
    failure_iteration: int | None
    stored: frozenset[tuple[int, int]] = frozenset()
    complete: frozenset[int] = frozenset()

    @property
    def newest(self) -> int:
        """The newest iteration from which all can go on exactly, 0 where there is none."""
        return max(self.committed | self.complete, default=0)

    @property
    def possible_failures(self) -> frozenset[int | None]:
        """Where the job can have failed: as its counters say, or where a rank has left a later state."""
        counted = self.failure_iteration
        return frozenset({counted, *(at for _, at in self.stored if counted is not None and at > counted)})


def states_in(run_dir: Path, memories: Sequence[Path] = (SHARED_MEMORY,)) -> list[MemoryState]:
    """What lies in the shared memory of the run's machines, whole or not."""
    run_id = _run_id(run_dir)
    return [] if run_id is None else [state for memory in memories for state in Arena(run_id, memory).list()]


def remove_memory(run_dir: Path, memories: Sequence[Path] = (SHARED_MEMORY,)) -> None:
    """Leave nothing there of this run, whole or torn."""
    run_id = _run_id(run_dir)
    for memory in memories if run_id is not None else ():
        remove_memory_states(str(run_id), memory)


def _run_id(run_dir: Path) -> str | None:
    identity = run_dir / IDENTITY
    return str(json.loads(identity.read_text())["run_id"]) if identity.exists() else None


def remains_of(run_dir: Path, memories: Sequence[Path] = (SHARED_MEMORY,)) -> Remains:
    """Look without changing anything."""
    progress = read_progress(run_dir, RANKS)
    stored = [state for state in states_in(run_dir, memories) if verify_memory_state(state) is None]
    first = newest_life(run_dir)[:2]
    newest = [state for state in stored if (state.life, state.branch) >= first]
    snapshots = {(state.rank, state.iteration) for state in newest if state.kind == "snapshot"}
    # Small states travel only where every rank's weights and moments are the same: any rank's snapshot has them.
    snapshots |= {(state.rank, state.iteration) for state in newest if state.kind == "window"}
    whole = {iteration for _, iteration in snapshots}
    small = {(state.rank, state.iteration) for state in newest if state.kind == "small" and state.iteration in whole}
    ranks = Counter(iteration for _, iteration in snapshots | small)
    return Remains(
        committed=frozenset(info.iteration for info in scan(run_dir / "checkpoints").checkpoints if info.full),
        failure_iteration=None if progress is None else progress.iteration,
        stored=frozenset((state.rank, state.iteration) for state in stored),
        complete=frozenset(iteration for iteration, count in ranks.items() if count == RANKS),
    )
