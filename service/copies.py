"""Where a checkpoint is: the run directory, the target of copies, and the host memory of the service's own machine."""

import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from cpsr.checkpoint.manifest import COMMIT, THINNED, step_name
from cpsr.checkpoint.memory_states import SHARED_MEMORY, MemoryState, files_of, memory_state
from cpsr.journal import CheckpointRow, JournalReader
from cpsr.service.identity import identity_of

__all__ = ["Copies", "Copy", "OnDisk", "kept_on_disk"]

OnDisk = Literal["whole", "weights", "none"]
# Of the events: the last one of a copy at the target.
COPIED, GONE = "target copied", ("target removed", "target set aside", "target copy damaged")
REPLICA = "-replica-"  # in the name of a file that this machine holds for a rank of another


class Copy(BaseModel):
    """One place where a checkpoint is."""

    tier: Literal["disk", "target", "memory", "peer"] = Field(
        description="`disk`: the run directory; `target`: where committed checkpoints are copied to; `memory`: host "
        "memory of the ranks on the service's machine; `peer`: replicas there, of ranks on other machines."
    )
    holds: Literal["whole", "weights", "small"] = Field(
        description="`whole`: training can restart from it; `weights`: kept for the predictor alone; `small`: what "
        "makes a whole state together with the holder's own."
    )
    bytes: int | None = Field(description="Of its files; null where they are not in sight.")
    verified: bool = Field(
        description="Whether every byte was read back and compared when it was written. What is in memory is compared "
        "with its checksum by whoever restores it."
    )
    ranks: list[int] | None = Field(description="Whose states are there; null for all.")
    copied_unix_seconds: float | None = Field(
        description="When it was made, from the journal; null for a place that was read just now."
    )


class Copies:
    """The known copies of some checkpoints.

    Host memory is read if the newest life of the run is on this machine and belongs to this user; memory of other
    machines is not visible here.

    Args:
        run_dir: of the run.
        reader: of its journal.
        rows: the checkpoints.
    """

    def __init__(self, run_dir: Path, reader: JournalReader, rows: Sequence[CheckpointRow]) -> None:
        self._run_dir = run_dir
        self._reader = reader
        self._folders = _names_in(run_dir / "checkpoints")  # few are left, of many rows
        lives = reader.lives()
        states = _states_here(run_dir) if lives and lives[-1].host == socket.gethostname() else None
        self.memory_seen = states is not None
        self._in_memory: dict[tuple[int, int], list[MemoryState]] = defaultdict(list)
        for state in states or ():
            self._in_memory[state.life, state.iteration].append(state)
        committed = [row.iteration for row in rows if row.status == "committed"]
        self._copied: dict[int, float] = {}  # iteration -> when the copy at the target was made
        for event in reader.events_of(committed, (COPIED, *GONE)):
            assert event.iteration is not None
            if event.kind == COPIED:
                self._copied[event.iteration] = event.created_unix_seconds
            else:
                self._copied.pop(event.iteration, None)

    def on_disk(self, row: CheckpointRow) -> OnDisk:
        """What the run directory holds of a checkpoint of this iteration."""
        there = row.status == "committed" and step_name(row.iteration) in self._folders
        return kept_on_disk(self._run_dir, row.iteration) if there else "none"

    def of(self, row: CheckpointRow) -> list[Copy]:
        """Every place of a committed checkpoint; none where its iteration was saved again since."""
        if row.status != "committed":
            return []
        states = self._in_memory.get((row.life, row.iteration), ())
        found = [*self._on_disk(row), *self._at_target(row)]
        found += _in_memory([one for one in states if REPLICA not in one.path.name], "memory")
        found += _in_memory([one for one in states if REPLICA in one.path.name], "peer")
        return found if found and self._reader.latest_checkpoint(row.iteration) == row else []

    def _on_disk(self, row: CheckpointRow) -> Iterable[Copy]:
        kept = self.on_disk(row)
        if kept != "none":
            size = _bytes_of(self._run_dir / "checkpoints" / step_name(row.iteration))
            yield Copy(tier="disk", holds=kept, bytes=size, verified=True, ranks=None, copied_unix_seconds=None)

    def _at_target(self, row: CheckpointRow) -> Iterable[Copy]:
        copied = self._copied.get(row.iteration)
        if copied is not None and copied >= row.created_unix_seconds:  # one from before is of another branch
            # Its files are those of the checkpoint, and each was compared with its record.
            yield Copy(
                tier="target", holds="whole", bytes=row.bytes, verified=True, ranks=None, copied_unix_seconds=copied
            )


def kept_on_disk(run_dir: Path, iteration: int) -> OnDisk:
    """What the run directory holds of a checkpoint of this iteration."""
    step = run_dir / "checkpoints" / step_name(iteration)
    if step.is_symlink() or not (step / COMMIT).is_file():
        return "none"
    return "weights" if (step / THINNED).exists() else "whole"


def _names_in(directory: Path) -> frozenset[str]:
    try:
        return frozenset(path.name for path in directory.iterdir())
    except OSError:
        return frozenset()


def _states_here(run_dir: Path) -> list[MemoryState] | None:
    """States of the run in this machine's memory; None where that is not readable."""
    run_id = identity_of(run_dir)[0].get("run_id")
    if run_id is None:
        return None
    try:
        states = [memory_state(path) for path in files_of(run_id, SHARED_MEMORY) if _is_own(path)]
    except OSError:
        return None
    return [state for state in states if state is not None]


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False  # removed meanwhile


def _in_memory(states: Sequence[MemoryState], tier: Literal["memory", "peer"]) -> Iterable[Copy]:
    small = [one for one in states if one.kind == "small"]
    whole = [one for one in states if one.kind != "small"]
    holds: Literal["whole", "small"]
    for holds, states in (("whole", whole), ("small", small)):
        if states:
            yield Copy(
                tier=tier,
                holds=holds,
                bytes=_sum(one.path for one in states),
                verified=False,
                ranks=sorted({one.rank for one in states}),
                copied_unix_seconds=None,
            )


def _bytes_of(directory: Path) -> int | None:
    try:
        return _sum(directory.iterdir())
    except OSError:
        return None  # it is being removed


def _sum(paths: Iterable[Path]) -> int | None:
    try:
        return sum(path.lstat().st_size for path in paths)
    except OSError:
        return None  # they are being removed
