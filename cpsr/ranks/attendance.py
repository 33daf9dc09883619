"""Which ranks have left their training loop, so that no rank waits for them in a collective of CPSR's."""

import json
import logging
import threading
import time
from dataclasses import asdict, dataclass
from typing import Literal

from torch.distributed.distributed_c10d import PrefixStore

from cpsr.errors import UnevenRanksError

__all__ = ["Attendance"]

logger = logging.getLogger(__name__)

# A pass that has ended on a rank may be followed by another one, after an evaluation on this rank. This long the
# others wait for its next batch, once they need it for a step.
NEXT_PASS_SECONDS = 20.0
MARK_SECONDS = 2.0  # for the store; training, and leaving, do not wait longer for it


@dataclass(frozen=True)
class Mark:
    """How a rank has left its loop.

    Attributes:
        iteration: its last one.
        how: its batches have ended; its `with` block has ended; an error has ended that.
        error: which.
    """

    iteration: int
    how: Literal["batches", "block", "error"]
    error: str = ""

    def of(self, rank: int) -> str:
        """A clause."""
        if self.how == "error":
            return f"rank {rank} has left its loop after iteration {self.iteration} with {self.error}"
        if self.how == "block":
            return f"rank {rank} has left the `with CPSRRecovery` block after iteration {self.iteration}"
        return f"rank {rank} has no more batches after iteration {self.iteration}"


class Attendance:
    """The marks of all ranks, in the store of torch's process group.

    Args:
        store: of this group alone.
        rank: this one.
        size: number of ranks.
    """

    def __init__(self, store: PrefixStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._own: Mark | None = None
        self._iteration: int | None = None  # that this rank trains; None: all others may be at any
        self._missed: dict[int, tuple[Mark, float]] = {}  # ranks without a next batch, and since when they are missed

    def train(self, iteration: int) -> None:
        """This rank trains, or has trained, this iteration: the others take part in its collectives."""
        self._iteration = iteration
        if self._own is not None:
            self._mark(None)

    def leave(self, iteration: int, error: str | None = None, *, may_return: bool = False) -> None:
        """This rank takes part in no step after `iteration`.

        Args:
            iteration: its last one.
            error: why, if not because its `with` block has ended.
            may_return: only its batches have ended.
        """
        self._iteration = iteration
        how: Literal["batches", "block", "error"] = "error" if error else "batches" if may_return else "block"
        self._mark(Mark(iteration, how, error or ""))

    def require_all(self) -> None:
        """Check whether the others will take part in what this rank waits for; it takes a round trip to the store.

        Raises:
            UnevenRanksError: a rank will not.
        """
        marks = self._marks()
        self._missed = {rank: seen for rank, seen in self._missed.items() if marks.get(rank) == seen[0]}
        for rank, mark in marks.items():
            if self._waits_in_vain(rank, mark):
                raise self._error(rank, mark)

    def _waits_in_vain(self, rank: int, mark: Mark) -> bool:
        if mark.how == "error":
            return True
        if self._iteration is None:
            return False
        if self._own is not None and self._own.how == "block":
            return mark.how == "block" and mark.iteration != self._iteration
        if mark.iteration >= self._iteration:
            return False
        _, since = self._missed.setdefault(rank, (mark, time.monotonic()))
        return mark.how == "block" or time.monotonic() - since > NEXT_PASS_SECONDS

    def _error(self, rank: int, mark: Mark) -> UnevenRanksError:
        if mark.how == "error":
            return UnevenRanksError(f"{mark.of(rank)}, and rank {self._rank} would wait for it without end")
        return UnevenRanksError(
            f"{mark.of(rank)}, and rank {self._rank} is at iteration {self._iteration}. A checkpoint needs the state "
            "of all ranks after the same iteration, so CPSR cannot follow ranks that take different numbers of steps, "
            "also inside torch's Join. The run is as it was last saved. Give all ranks the same number of batches: "
            "DistributedSampler does, drop_last=True of the loader may be needed, too; or let all ranks leave the loop "
            "at the same step"
        )

    def _marks(self) -> dict[int, Mark]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            if not self._store.add("marks", 0):
                return {}
            left = [rank for rank in others if self._store.check([str(rank)])]
            found = {rank: json.loads(self._store.get(str(rank))) for rank in left}
        except RuntimeError as error:  # its host is gone, which the collective itself finds out
            logger.debug("cannot see which ranks have left their loop: %s", error)
            return {}
        return {rank: Mark(**mark) for rank, mark in found.items() if mark is not None}

    def _mark(self, mark: Mark | None) -> None:
        if mark == self._own:
            return
        self._own = mark
        # The store may hang with its host.
        telling = threading.Thread(target=self._tell, args=(mark,), daemon=True)
        telling.start()
        telling.join(MARK_SECONDS)

    def _tell(self, mark: Mark | None) -> None:
        try:
            self._store.set(str(self._rank), json.dumps(None if mark is None else asdict(mark)))
            self._store.add("marks", 1)
        except RuntimeError as error:
            logger.debug("cannot tell the other ranks that this one leaves its loop: %s", error)
