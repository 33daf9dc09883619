"""The measured costs of one rank's checkpoints, and how rank 0 reads those of the others."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpsr.checkpoint.catalogue import scan
from cpsr.checkpoint.verify import read_manifest, read_rank_manifest
from cpsr.checkpoint.writer import SaveOutcome
from cpsr.errors import CheckpointError

__all__ = ["RankCosts", "RankReport", "SaveTimes", "costs_of_ranks", "second_moment_share"]

logger = logging.getLogger(__name__)

MEASURED_SAVES = 8  # stall and persist times are medians of this many


@dataclass(frozen=True)
class RankCosts:
    """The costs of one rank's checkpoints.

    Attributes:
        iteration: of the newest one that was measured.
        saves: number of saves behind the medians.
        stall_seconds: extra time of the training thread (see `StallMeter`).
        persist_seconds: from the snapshot to the rank's files being durable, and on rank 0 the commit.
        parameters: weights that the rank owns.
        mean_second_moment: of its gradients; None if the optimizer keeps none.
    """

    iteration: int
    saves: int
    stall_seconds: float
    persist_seconds: float
    parameters: int
    mean_second_moment: float | None


@dataclass(frozen=True)
class RankReport:
    """What a rank has measured.

    Attributes:
        costs: of its checkpoints.
        memory: of its snapshots in host memory; what `MemoryTimes.to_tree` returned.
    """

    costs: RankCosts
    memory: Mapping[str, float] = field(default_factory=dict)


class SaveTimes:
    """This rank's newest saves.

    Args:
        parameters: weights that the rank owns.
    """

    def __init__(self, parameters: int) -> None:
        self._parameters = parameters
        self._saves: deque[tuple[SaveOutcome, float]] = deque(maxlen=MEASURED_SAVES)
        self._before: RankCosts | None = None

    def note(self, outcome: SaveOutcome, stall_seconds: float) -> None:
        """Add a successful save, and its cost for the training thread."""
        self._saves.append((outcome, stall_seconds))

    def costs(self) -> RankCosts | None:
        """Medians over the newest saves; before the first save those of the last life, None in the first life."""
        if not self._saves:
            return self._before
        newest = self._saves[-1][0]
        return RankCosts(
            newest.iteration,
            len(self._saves),
            statistics.median(stall for _, stall in self._saves),
            statistics.median(save.write_seconds + save.commit_seconds for save, _ in self._saves),
            self._parameters,
            newest.mean_second_moment,
        )

    def restore(self, tree: dict[str, Any] | None) -> None:
        """Load what `to_tree` of the last life returned."""
        self._before = None if tree is None else RankCosts(**tree)

    def to_tree(self) -> dict[str, Any] | None:
        """The costs as plain data, for this rank's part of the next checkpoint."""
        costs = self.costs()
        return None if costs is None else asdict(costs)


def costs_of_ranks(store_directory: Path, world_size: int) -> list[RankReport]:
    """What every rank has reported in the newest checkpoint; empty if a rank has not yet, or it cannot be read.

    Args:
        store_directory: the run's `checkpoints`.
        world_size: number of ranks.
    """
    committed = [info for info in scan(store_directory).checkpoints if info.full]  # partial ones have no costs
    if not committed:
        return []
    directory = committed[-1].directory
    found: list[RankReport] = []
    try:
        manifest = read_manifest(directory)
        for rank in range(world_size):
            scalars = read_rank_manifest(directory, manifest, rank).scalars
            planning = scalars["planning"]
            if planning["costs"] is None:
                return []
            found.append(RankReport(RankCosts(**planning["costs"]), planning.get("memory", {})))
    except (CheckpointError, OSError, KeyError, TypeError) as error:
        logger.warning("cannot read the other ranks' costs from %s, rank 0's are used for all: %s", directory, error)
        return []
    return found


def second_moment_share(ranks: Sequence[RankCosts]) -> float | None:
    """Ratio of all ranks' mean second moment to the first rank's; each rank counts by its weights.

    Ranks whose optimizer keeps none are left out. None if the first has none, or it is zero or not finite.

    Args:
        ranks: at least one, of one checkpoint: Adam's bias is then equal in all, and cancels in the ratio.
    """
    known = [(rank.parameters, rank.mean_second_moment) for rank in ranks if rank.mean_second_moment is not None]
    weights = sum(parameters for parameters, _ in known)
    own = ranks[0].mean_second_moment
    if not own or not weights:
        return None
    share = sum(parameters * moment for parameters, moment in known) / weights / own
    return share if 0 < share < math.inf else None
