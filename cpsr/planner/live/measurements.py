"""What checkpoints and snapshots cost each rank, measured on the training thread, and what they cost the job."""

import logging
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.writer import SaveOutcome
from cpsr.errors import CheckpointError

__all__ = ["MEASURED", "RankCosts", "RankTimes", "costs_of_ranks", "of_job"]

logger = logging.getLogger(__name__)

MEASURED = 8  # times are medians of this many checkpoints, snapshots or replicas
CALM_STEPS = 50  # the pace of training is the median of this many steps without a checkpoint under way
CALM_STEPS_MIN = 5
LONGER_STEPS = 32  # with a snapshot in memory, whose median is taken: single steps differ by more than it costs


@dataclass(frozen=True)
class RankCosts:
    """The costs of one rank's checkpoints and snapshots, or of the job's.

    Attributes:
        stall_seconds: extra time of the training thread.
        persist_seconds: from the snapshot to the rank's files being durable, and on rank 0 the commit.
        parameters: weights that the rank owns, or all ranks together.
        mean_second_moment: of its gradients, or of all ranks'; None if the optimizer keeps none.
        memory: medians of its snapshots in host memory, by name: `stall_seconds`, by which those that went to memory
            alone lengthen a step, `copy_seconds` for which training waited for those of checkpoints, and
            `replica_seconds` until a replica is whole on another machine.
    """

    stall_seconds: float
    persist_seconds: float
    parameters: int
    mean_second_moment: float | None
    memory: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any] | None) -> "RankCosts | None":
        """What a checkpoint has of them; None of None, and where another version has left too little."""
        names = {one.name for one in fields(cls)}
        return None if tree is None or not names <= tree.keys() else cls(**{name: tree[name] for name in names})


class RankTimes:
    """The newest times of this rank's checkpoints and snapshots: noted by the training thread, read by the planner's.

    A checkpoint's stall is how much longer steps take from its begin until it is durable. That of a snapshot to memory
    is how much longer its step takes, since a thread that copies takes its time from training where all cores compute.
    It is at least as long as training waited. It is at most that and the copy: what the script does in the same steps,
    as an evaluation, is not its cost. Until a time is measured in this life, that of the last life stands for it; that
    of snapshots to memory until some steps have shown it, of which a single one may also be shorter.

    Args:
        parameters: weights that the rank owns.

    Attributes:
        snapshots: number of those to host memory alone in this life.
        steps_seconds: durations of steps, added by the training thread, since the last `settle`.
    """

    def __init__(self, parameters: int) -> None:
        self.snapshots = 0
        self.steps_seconds: list[float] = []
        self._parameters = parameters
        self._calm: deque[float] = deque(maxlen=CALM_STEPS)
        self._writing: deque[float] = deque(maxlen=CALM_STEPS)  # while a checkpoint is under way, without a snapshot
        self._under_way: list[float] | None = None
        self._snapshot: tuple[float, float] | None = None  # of the step under way: waited for, and copied for
        self._saves: deque[tuple[SaveOutcome, float]] = deque(maxlen=MEASURED)
        self._before: RankCosts | None = None
        names = ("stall_seconds", "copy_seconds", "replica_seconds")
        self._memory: dict[str, deque[float]] = {name: deque(maxlen=MEASURED) for name in names}
        self._longer: deque[float] = deque(maxlen=LONGER_STEPS)  # seconds by which those to memory alone lengthen steps
        self._lock = threading.Lock()

    def begun(self) -> None:
        """A checkpoint was begun."""
        self.settle()
        self._under_way = []

    def settle(self) -> None:
        """Count the steps so far."""
        with self._lock:
            for seconds in self.steps_seconds:
                self._count(seconds)
        self.steps_seconds.clear()

    def _count(self, seconds: float) -> None:
        """Count one step; what a snapshot to memory alone takes of it is no cost of the disk."""
        snapshot, self._snapshot = self._snapshot, None
        pace = self._calm if self._under_way is None else self._writing
        if snapshot is None:
            pace.append(seconds)
        elif len(pace) >= CALM_STEPS_MIN:
            self._longer.append(min(seconds - statistics.median(pace), sum(snapshot)))
        if self._under_way is not None:
            self._under_way.append(seconds if snapshot is None else seconds - snapshot[0])

    def durable(self, outcome: SaveOutcome) -> None:
        """The checkpoint is durable: its stall is at least the time in which training waited."""
        self.settle()
        with self._lock:
            steps, self._under_way = self._under_way, None
            stall_seconds = outcome.stall_seconds
            # If checkpoints follow each other so closely that no pace is known, it is just that time.
            if steps and len(self._calm) >= CALM_STEPS_MIN:
                stall_seconds = max(stall_seconds, sum(steps) - len(steps) * statistics.median(self._calm))
            self._saves.append((outcome, stall_seconds))
            self._memory["copy_seconds"].append(outcome.stall_seconds)

    def snapshot(self, stall_seconds: float, copy_seconds: float) -> None:
        """A snapshot went to host memory alone, in the step under way.

        Args:
            stall_seconds: for which training waited.
            copy_seconds: that the copy took.
        """
        self.settle()
        with self._lock:
            self.snapshots += 1
            self._snapshot = stall_seconds, copy_seconds
            self._memory["stall_seconds"].append(stall_seconds)

    def replica(self, seconds: float) -> None:
        """A snapshot was whole on another machine so long after it was taken."""
        with self._lock:
            self._memory["replica_seconds"].append(seconds)

    def costs(self, *, memory_alone: bool = False) -> RankCosts | None:
        """Medians over the newest saves; before the first save those of the last life, None in the first life.

        Args:
            memory_alone: in the first life the snapshots will do, once so many are measured: checkpoints cost nothing.
        """
        with self._lock:
            saves, before = list(self._saves), self._before
            if before is None and memory_alone and self.snapshots >= MEASURED:
                before = RankCosts(0.0, 0.0, self._parameters, None)
            memory = {name: statistics.median(seconds) for name, seconds in self._memory.items() if seconds}
            longer = list(self._longer)
        if longer:
            memory["stall_seconds"] = max(memory["stall_seconds"], statistics.median(longer))
        if before is not None:
            if len(longer) < MEASURED and "stall_seconds" in before.memory:
                memory.pop("stall_seconds", None)
            memory = {**before.memory, **memory}
        if not saves:
            return None if before is None else replace(before, memory=memory)
        return RankCosts(
            statistics.median(stall for _, stall in saves),
            statistics.median(save.write_seconds + save.commit_seconds for save, _ in saves),
            self._parameters,
            saves[-1][0].mean_second_moment,
            memory,
        )

    def restore(self, costs: Mapping[str, Any] | None, *, replicates: bool) -> None:
        """Load the costs of the last life.

        Args:
            costs: as plain data; None where another number of ranks had measured them.
            replicates: whether other machines take replicas in this life; else those of the last life count no more.
        """
        before = RankCosts.of_tree(costs)
        if before is not None and not replicates:
            memory = {name: value for name, value in before.memory.items() if name != "replica_seconds"}
            before = replace(before, memory=memory)
        self._before = before


def costs_of_ranks(store_directory: Path, ranks: int) -> list[RankCosts]:
    """What every rank has recorded in the newest checkpoint; empty if one has not yet, or it cannot be read.

    Args:
        store_directory: the run's `checkpoints`.
        ranks: number of them.
    """
    committed = [info for info in scan(store_directory).checkpoints if info.full]  # others have no costs
    if not committed:
        return []
    newest = committed[-1]
    try:
        scalars = [newest.record(rank).scalars for rank in range(ranks)]
        found = [RankCosts.of_tree(one["planning"]["costs"]) for one in scalars]
    except (CheckpointError, OSError, KeyError) as error:
        logger.warning("cannot read the ranks' costs from %s, rank 0's are used for all: %s", newest.directory, error)
        return []
    known = [costs for costs in found if costs is not None]
    return known if len(known) == ranks else []


def of_job(ranks: Sequence[RankCosts]) -> RankCosts:
    """What the job plans from: rank 0's checkpoints, the slowest rank's snapshots, and the weights of all.

    Rank 0's commit waits for all files, but nothing at rank 0 shows how long another rank waits for a snapshot. The
    second moment is the mean over all weights. Replicas count if every rank has them.

    Args:
        ranks: at least one; the first is rank 0.
    """
    known = [(rank.parameters, rank.mean_second_moment) for rank in ranks if rank.mean_second_moment is not None]
    weights = sum(parameters for parameters, _ in known)
    # The copy of a checkpoint stands for a rank's snapshot until one was taken.
    stalls = [rank.memory.get("stall_seconds", rank.memory.get("copy_seconds")) for rank in ranks]
    replicas = [rank.memory.get("replica_seconds") for rank in ranks]
    memory = {
        "stall_seconds": [seconds for seconds in stalls if seconds is not None],
        "replica_seconds": [] if None in replicas else [seconds for seconds in replicas if seconds is not None],
    }
    return replace(
        ranks[0],
        parameters=sum(rank.parameters for rank in ranks),
        mean_second_moment=sum(parameters * moment for parameters, moment in known) / weights if weights else None,
        memory={name: max(seconds) for name, seconds in memory.items() if seconds},
    )
