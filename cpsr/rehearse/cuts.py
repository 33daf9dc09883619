"""Where a rehearsal cuts its jobs short: inside a pass over the data, and at its end."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cpsr.life.rehearsed import Cut
from cpsr.state.witness import Witness

__all__ = ["STEPS_MIN", "PlannedCut", "ends_of_passes", "plan_cuts"]

STEPS_MIN = 6
INTERVALS = 6  # between checkpoints in one job


@dataclass(frozen=True)
class PlannedCut:
    """One cut, and the checkpoint before it.

    Attributes:
        cut: see there.
        interval_iterations: between checkpoints.
        name: for people.
    """

    cut: Cut
    interval_iterations: int
    name: str


def interval_of(steps: int) -> int:
    """Iterations between checkpoints of a job of so many steps."""
    return max(1, min(5, steps // INTERVALS))


def plan_cuts(steps: int, ranks: int, ends: Sequence[int], *, requests: bool = True) -> list[PlannedCut]:
    """One SIGKILL of a rank, one of all ranks, and one SIGTERM, each in a job of its own.

    Args:
        steps: of each job.
        ranks: of each job.
        ends: the last step of each pass over the data that ends within these.
        requests: whether the loop takes batches from `recovery.resume`.
    """
    every = interval_of(steps)
    later = max(1, every - 2)  # steps after a checkpoint, so that a restart repeats some
    last = ranks - 1
    at = 2 * every + later
    while ends and at + 1 < steps and {at - 1, at} & set(ends):  # inside a pass, where its length allows
        at += 1
    of_one = Cut("SIGKILL", at, last)
    found = [PlannedCut(of_one, every, f"SIGKILL of rank {last} after step {of_one.iteration}")]
    end = next((end for end in ends if 2 <= end <= steps - 3), None)
    everyone = "all ranks" if ranks > 1 else "rank 0"
    if end is None:
        of_all = Cut("SIGKILL", 3 * every + later, at_request=requests)
        where = f"{'at the batch request ' if requests else ''}after step {of_all.iteration}"
    else:
        # The checkpoint of the pass's last step is complete when the next step is.
        of_all = Cut("SIGKILL", end + 1)
        where = f"after step {of_all.iteration}, the first of a new pass"
        every_of_all = next(count for count in range(min(end, 5), 0, -1) if end % count == 0)
        every_of_all = end if every_of_all == 1 else every_of_all
    found.append(PlannedCut(of_all, every if end is None else every_of_all, f"SIGKILL of {everyone} {where}"))
    left = Cut("SIGTERM", 4 * every + 1, last)
    found.append(PlannedCut(left, every, f"SIGTERM after step {left.iteration}"))
    return found


def ends_of_passes(witnesses: Sequence[Witness]) -> list[int]:
    """The last step of each complete pass over the data.

    Args:
        witnesses: of one rank, in the order of the steps.
    """
    found = []
    for before, now in pairwise(witnesses):
        if now.epoch > before.epoch:
            found.append(now.iteration if now.batch == 0 else before.iteration)
    return found
