"""Probation of a predicted state: until the first iterations show that it trains, it may be discarded."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from cpsr.checkpoint.snapshot import SnapshotPool
from cpsr.config import CPSRConfig
from cpsr.job import Job, Part, Rewind
from cpsr.learning.learner import Learner
from cpsr.life.outcome import LagReport, RecoveredLag, RecoveryOutcome, losses_before
from cpsr.predictor.watch import WATCH_ITERATIONS, Watch, WatchDecision
from cpsr.ranks.group import Group
from cpsr.restart.restore import Restored
from cpsr.state.losses import LossRecorder

__all__ = ["Probation"]

NOISE_NATS = 0.2  # allowed beyond the tolerance of the probes, which are the same batches before and after


class Probation(Part):
    """Watches a predicted state on all ranks together, and records what became of it; opening it is a collective.

    The training loss, averaged over the ranks that see one, is compared with its level before the failure. Meanwhile
    the checkpoint behind the prediction stays in host memory. Without a prediction, or without a loss to compare with,
    there is no watch.

    Args:
        job: this rank's.
        restored: how this life began.
        losses: of this rank.
        pool: keeps the checkpoint.
        learner: gets the measurements for the predictor.
        cause: how the last life ended, as a clause; None if it ended in good order.

    Attributes:
        lag: measures how far the recovered run is behind.
    """

    def __init__(
        self,
        job: Job,
        restored: Restored,
        losses: LossRecorder,
        pool: SnapshotPool,
        learner: Learner,
        cause: str | None,
    ) -> None:
        self._group = job.group
        self._losses = losses
        self._pool = pool
        self._watch = _watch(restored, job.config, job.group)
        if self._watch is not None:
            pool.occupancy.pin()
        self._outcome = RecoveryOutcome(job, learner, restored, cause, self.active)
        follows = restored.predicted and not restored.partly_predicted
        iteration = restored.restored_iteration
        measured = RecoveredLag(losses_before(job.journal, iteration), iteration) if follows else None
        self.lag = LagReport(job, self._outcome, measured)

    @property
    def active(self) -> bool:
        """Whether the state may still be discarded."""
        return self._watch is not None

    def observe(self, iteration: int) -> WatchDecision | None:
        """Evaluate the iteration that has just ended; a collective while the watch is active.

        Returns:
            The decision, the same on every rank; None while there is none.
        """
        if self._watch is None:
            return None
        loss = self._losses.latest()
        own = [0.0 if loss is None else loss, float(loss is not None)]
        seen = torch.tensor(own, dtype=torch.float64, device="cpu")
        total, count = self._group.reduce(seen).tolist()
        decision = self._watch.observe(iteration, total / count) if count else None
        return None if decision is None or decision.status == "watching" else decision

    def keep(self, watch: Mapping[str, Any]) -> None:
        """The state is kept: release the checkpoint in memory; without a watch nothing happens.

        Args:
            watch: what the watch found, for the journal.
        """
        if self._watch is not None:
            self._end("kept", watch)

    def discard(self, restored: Restored, watch: Mapping[str, Any]) -> None:
        """The state was discarded: the life continues from this one."""
        self._outcome.rolled_back(restored)
        self._end("rolled_back", watch)

    def _end(self, outcome: Literal["kept", "rolled_back"], watch: Mapping[str, Any]) -> None:
        self._watch = None
        self._pool.occupancy.unpin()
        self._outcome.end_watch(outcome, dict(watch))

    def rewound(self, to: Rewind) -> None:
        """The recovered state was discarded or replaced."""
        self.lag.rewound(to)


def _watch(restored: Restored, config: CPSRConfig, group: Group) -> Watch | None:
    if not restored.beginning.predicted or restored.scalars is None:
        return None
    baseline = _mean_over_ranks(restored.scalars.recent_losses, group)
    if not any(math.isfinite(loss) for loss in baseline):
        return None  # nothing to compare with
    return Watch(baseline, WATCH_ITERATIONS, config.restart.loss_tolerance_nats + NOISE_NATS)


def _mean_over_ranks(losses: list[float], group: Group) -> list[float]:
    """Mean loss of each recent iteration over the ranks that saw it; empty if none did."""
    lengths = [length for length in group.gather(len(losses)) if length]
    if not lengths:
        return []
    length = min(lengths)
    own = losses[-length:] if losses else [0.0] * length
    values = torch.tensor(own, dtype=torch.float64, device="cpu")
    mean: list[float] = (group.reduce(values) / len(lengths)).tolist()
    return mean
