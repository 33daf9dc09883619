"""The newest checkpoint that every rank can verify, in the recovery buffer."""

import logging
from collections.abc import Sequence
from typing import NoReturn

from cpsr.checkpoint.remote.target import CheckpointTarget
from cpsr.checkpoint.snapshot import Snapshot, SnapshotPool
from cpsr.checkpoint.store import CheckpointStore
from cpsr.errors import RecoveryError
from cpsr.ranks.group import Group
from cpsr.restart.agreement import load_together
from cpsr.restart.ladder import Ladder
from cpsr.restart.older_experts import older_experts
from cpsr.restart.weights_alone import NewestWeights, WeightsAlone

__all__ = ["NewestCheckpoint"]

logger = logging.getLogger(__name__)


class NewestCheckpoint:
    """Finds a checkpoint on the disk, or at the target of its copies; every method is a collective.

    Args:
        group: the ranks.
        store: the run's checkpoints.
        target: where copies of them may come from.
        pool: the host buffers; what is loaded stays in the recovery buffer.
        ladder: finds whether a state in memory can replace a checkpoint.
        weights: finds a checkpoint of weights where none is whole.

    Attributes:
        damaged: iteration -> what is wrong with a checkpoint that was skipped.
    """

    def __init__(
        self,
        group: Group,
        store: CheckpointStore,
        target: CheckpointTarget,
        pool: SnapshotPool,
        ladder: Ladder,
        weights: NewestWeights,
    ) -> None:
        self._group = group
        self._store = store
        self._target = target
        self._pool = pool
        self._ladder = ladder
        self._weights = weights
        self.damaged: dict[int, str] = {}

    def load(self, *, inexact: bool) -> Snapshot | WeightsAlone | None:
        """Load the newest checkpoint that can be used; damaged newer ones are set aside.

        Args:
            inexact: whether a checkpoint is acceptable with experts that were saved before it, or with weights alone.

        Returns:
            This rank's part; None where the run has never committed a checkpoint.

        Raises:
            RecoveryError: checkpoints were committed, but none of them can be used.
            RunMismatchError: they belong to another model or to other slices of it.
        """
        passed_over: list[int] = []
        while (iteration := self._newest_usable(passed_over)) is not None:
            snapshot = self._pool.acquire(iteration)
            if snapshot is None:
                raise RecoveryError("no host buffer is free to restore into; this is a defect, please report it")
            problem = self.load_into(snapshot)
            if problem is None and not inexact and self._only_with_older_experts(snapshot):
                logger.warning("checkpoint %d has experts that are older: mode 'exact' goes behind it", iteration)
                self._pool.release(snapshot)
                passed_over.append(iteration)
                continue
            if problem is None:
                self._pool.keep(snapshot)
                self._set_damaged_aside()
                return snapshot
            self._pool.release(snapshot)
            self.damaged[iteration] = problem
            logger.error("checkpoint %d cannot be used; trying the next older one. %s", iteration, problem)
        return self._weights_alone(passed_over, allowed=inexact)

    def load_into(self, snapshot: Snapshot) -> str | None:
        """Load this rank's part of the checkpoint of the snapshot's iteration.

        Returns:
            What is wrong with the checkpoint on any rank.

        Raises:
            RunMismatchError: a rank's part is of another model or split over ranks; every rank raises it.
            RecoveryError: a file system cannot read a file now: the checkpoint may be whole, and continuing from an
                older one would abandon it; every rank raises it.
        """

        def load() -> None:
            snapshot.scalars = self._store.load(snapshot.iteration, snapshot.shard)

        return load_together(self._group, snapshot.iteration, load)

    def _newest_usable(self, passed_over: Sequence[int]) -> int | None:
        """The newest checkpoint that was not skipped, fetched first where the target has a newer one."""
        fetched = self._target.fetch(self._store, self.damaged)
        if fetched is not None:
            self.damaged.pop(fetched, None)
        full = [info.iteration for info in self._store.catalogue() if info.full]
        usable = [iteration for iteration in full if iteration not in self.damaged and iteration not in passed_over]
        newest: int | None = self._group.broadcast(max(usable, default=None))
        return newest

    def _only_with_older_experts(self, snapshot: Snapshot) -> bool:
        """Whether experts are older than their checkpoint, and no state of its iteration or newer is in memory."""
        if older_experts(snapshot, self._group) is None:
            return False
        found = self._ladder.decide(snapshot.iteration, None, snapshot.shard, stale=True, inexact=False)
        return found.exact[0].tier == "disk"

    def _set_damaged_aside(self) -> None:
        """Set damaged ones aside, once an older one is in memory: else they may be all that is left."""
        for iteration, problem in self.damaged.items():
            if self._group.rank == 0:
                self._store.quarantine(iteration, problem)
        self._group.barrier()

    def _weights_alone(self, passed_over: Sequence[int], *, allowed: bool) -> WeightsAlone | None:
        """The newest checkpoint of weights; a run never starts from scratch after a commit.

        Returns:
            None where nothing was committed.

        Raises:
            RecoveryError: something was committed, and it cannot be used, or is not allowed.
        """
        remains = self._group.broadcast(self._store.remains())
        if not remains:
            return None
        found = None if passed_over else self._weights.load()
        self.damaged |= self._weights.damaged
        if found is None or not allowed:
            self._refuse(passed_over, remains, found)
        self._set_damaged_aside()
        asides = [name for name in self._group.broadcast(self._store.remains()) if name.startswith("damaged-")]
        return WeightsAlone(found, tuple(asides))

    def _refuse(self, passed_over: Sequence[int], remains: Sequence[str], weights: Snapshot | None) -> NoReturn:
        if passed_over:
            raise RecoveryError(
                f"checkpoints {passed_over} hold experts that are older than they are, and no older checkpoint is left "
                "whose experts are all of one iteration, as mode 'exact' needs. Nothing was changed: start with mode "
                "'auto', which predicts these experts or goes on with them as they are"
            )
        other = "Put a whole one back from a copy, or use another run_dir to start anew"
        if weights is not None:
            in_memory = self._ladder.decide(None, None, None).exact_iteration
            how = f"from weights alone, those of checkpoint {weights.iteration}, with the optimizer's moments at zero"
            how = how if in_memory is None else f"exactly, from the state of iteration {in_memory} in memory"
            other = f"Mode 'auto' would go on {how}. Or p{other[1:]}"
        obstacles = [f". Checkpoint {at} keeps weights alone, and {why}" for at, why in self._weights.obstacles.items()]
        raise RecoveryError(
            f"none of the checkpoints of this run can be restored: "
            f"{'; '.join(self.damaged.values()) or 'none is whole'}{''.join(obstacles[:1])}. Nothing was changed; the "
            f"directory holds {', '.join(remains)}. {other}"
        )
