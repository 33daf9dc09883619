"""The measured costs of snapshots in host memory, and of their replicas."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from cpsr.config import CPSRConfig
from cpsr.planner.inputs import MemoryTier, Origin

__all__ = ["MEASURED_SNAPSHOTS", "MemoryTimes", "memory_tier", "window_tier"]

MEASURED_SNAPSHOTS = 8  # times are medians of this many


class MemoryTimes:
    """The newest snapshots; until one was measured, the copies of checkpoints stand for them.

    Attributes:
        noted: number of all stalls of this life.
        window_iterations: length of windows, which take the place of snapshots; None where none are taken.
    """

    def __init__(self) -> None:
        self._stalls: deque[float] = deque(maxlen=MEASURED_SNAPSHOTS)
        self._copies: deque[float] = deque(maxlen=MEASURED_SNAPSHOTS)
        self._replicas: deque[float] = deque(maxlen=MEASURED_SNAPSHOTS)
        self._before: dict[str, float] = {}  # medians of the last life
        self.noted = 0
        self.window_iterations: int | None = None

    @property
    def origins(self) -> dict[str, Origin]:
        """Of the times that were measured in this life."""
        measured = {"memory_stall_seconds": len(self._stalls), "replica_seconds": len(self._replicas)}
        return {name: Origin.of_samples(samples, 0) for name, samples in measured.items() if samples}

    def note(self, stall_seconds: float) -> None:
        """Add the stall of a snapshot that went to memory alone."""
        self._stalls.append(stall_seconds)
        self.noted += 1

    def note_copy(self, stall_seconds: float) -> None:
        """Add the time that training waited for the copy of a checkpoint."""
        self._copies.append(stall_seconds)

    def note_replica(self, seconds: float) -> None:
        """Add the time from a snapshot to its whole replica on another machine."""
        self._replicas.append(seconds)

    def restore(self, tree: dict[str, Any] | None, *, replicates: bool) -> None:
        """Load what `to_tree` of the last life returned.

        Args:
            tree: None if it returned nothing.
            replicates: whether other machines take replicas in this life; else those of the last life count no more.
        """
        self._before = {} if tree is None else {name: float(value) for name, value in tree.items()}
        if not replicates:
            self._before.pop("replica_seconds", None)

    def to_tree(self) -> dict[str, float]:
        """Medians as plain data, for this rank's part of the next checkpoint."""
        found = dict(self._before)
        times = {"stall_seconds": self._stalls, "copy_seconds": self._copies, "replica_seconds": self._replicas}
        return found | {name: statistics.median(seconds) for name, seconds in times.items() if seconds}


def memory_tier(
    known: Mapping[str, float], config: CPSRConfig, iteration_seconds: float, checkpoint_stall_seconds: float
) -> MemoryTier:
    """A rank's snapshots: their measured costs, and the limits of their interval.

    Args:
        known: `MemoryTimes.to_tree` of the rank.
        config: of the run.
        iteration_seconds: of the job.
        checkpoint_stall_seconds: of a checkpoint, where nothing else is known.
    """
    stall_seconds = known.get("stall_seconds", known.get("copy_seconds", checkpoint_stall_seconds))
    budget_seconds = config.memory.budget_fraction * iteration_seconds  # per iteration
    longest = None
    if budget_seconds > 0 and math.isfinite(stall_seconds):
        longest = max(config.planner.interval_min_iterations, math.ceil(stall_seconds / budget_seconds))
    interval = config.memory.interval_iterations
    return MemoryTier(stall_seconds, interval, known.get("replica_seconds"), longest_iterations=longest)


def window_tier(known: Mapping[str, float], window_iterations: int | None) -> MemoryTier | None:
    """What is known of a rank's windows; they go on all the time, so that each of them stalls nothing more.

    Args:
        known: `MemoryTimes.to_tree` of the rank.
        window_iterations: their length; None where none are taken, and failures go back to the disk.
    """
    if window_iterations is None:
        return None
    return MemoryTier(0.0, window_iterations, known.get("replica_seconds"), window=True)
