"""From memory over time to what the predictor takes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cpsr.benchmarks.overhead.timeline import Timeline

__all__ = ["MEMORY_AIM_BYTES", "MemoryResult", "MemoryRun", "summarise_memory"]

MEMORY_AIM_BYTES = 200_000_000


@dataclass(frozen=True)
class MemoryRun:
    """A life that fails and the one that comes back, with the predictor and without."""

    failing: Timeline
    restarted: Timeline
    failing_without: Timeline
    restarted_without: Timeline


@dataclass(frozen=True)
class MemoryResult:
    """How far the peaks with the predictor lie above those without.

    Attributes:
        failing_bytes: in the life that fails, of each run; noise of a few megabytes may make it negative.
        restarted_bytes: in the life that comes back, recovery included, of each run.
        bound_bytes: what the predictor takes at most by its own arithmetic.
        learned_checkpoints: before the failure, of each run.
        predicted: whether every run with the predictor came back by prediction.
    """

    failing_bytes: list[int]
    restarted_bytes: list[int]
    bound_bytes: int
    learned_checkpoints: list[int]
    predicted: bool

    @property
    def peak_bytes(self) -> int:
        """The largest of all."""
        return max(*self.failing_bytes, *self.restarted_bytes)

    def aims(self) -> dict[str, bool]:
        """Each aim and whether it is met."""
        return {
            f"the predictor takes less than {MEMORY_AIM_BYTES / 1e6:.0f} MB": self.peak_bytes < MEMORY_AIM_BYTES,
            "the predictor takes no more than its arithmetic says": self.peak_bytes <= self.bound_bytes,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"aims": self.aims()}


def summarise_memory(runs: Sequence[MemoryRun], bound_bytes: int) -> MemoryResult:
    """The figures of all runs.

    Args:
        runs: at least one.
        bound_bytes: what the predictor takes at most by its own arithmetic.
    """
    return MemoryResult(
        [run.failing.peak_bytes - run.failing_without.peak_bytes for run in runs],
        [run.restarted.peak_bytes - run.restarted_without.peak_bytes for run in runs],
        bound_bytes,
        [run.failing.learned_checkpoints for run in runs],
        all(run.restarted.predicted for run in runs),
    )
