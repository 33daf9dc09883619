"""Probation of a predicted state, and the recovery's row in the journal."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from cpsr.config import CPSRConfig
from cpsr.job import Job
from cpsr.predictor.divergence_watch import Watch, WatchDecision
from cpsr.ranks.group import Group
from cpsr.restart.restored_state import Restored, report_recovery
from cpsr.state.losses import LossRecorder

__all__ = ["Probation"]

NOISE_NATS = 0.2  # allowed beyond the tolerance of the probes, which are the same batches before and after


class Probation:
    """Watches a predicted state on all ranks together, and records what became of it; opening it is a collective.

    The training loss, averaged over the ranks that see one, is compared with its level before the failure. Meanwhile
    the checkpoint behind the prediction stays in host memory. Without a prediction, or without a loss to compare with,
    there is no watch.

    Args:
        let_go: called once the state may not be discarded any more, or at once without a watch.
        cause: how the last life ended, as a clause; None if it ended in good order.
    """

    def __init__(
        self,
        job: Job,
        restored: Restored,
        losses: LossRecorder,
        let_go: Callable[[], None],
        cause: str | None,
    ) -> None:
        self._job, self._restored, self._losses = job, restored, losses
        self._let_go = let_go
        self._watch = _watch(restored, job.config, job.group)
        if self._watch is None:
            let_go()
        self._row = report_recovery(job.journal, restored, cause, job.config.mode, self.active)

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
        total, count = self._job.group.reduce(seen).tolist()
        decision = self._watch.observe(iteration, total / count) if count else None
        return None if decision is None or decision.status == "watching" else decision

    def keep(self, watch: Mapping[str, Any]) -> None:
        """The state is kept: release the checkpoint in memory; without a watch nothing happens."""
        if self._watch is not None:
            self._end("kept", watch)

    def discard(self, restored: Restored, watch: Mapping[str, Any]) -> None:
        """The state was discarded: the life continues from this one."""
        self._restored = restored
        self._end("rolled_back", watch, rolled_back_to=restored.method)

    def _end(self, outcome: Literal["kept", "rolled_back"], watch: Mapping[str, Any], **more: Any) -> None:
        self._watch = None
        self._let_go()
        if self._row is not None:
            guard = {**self._restored.guard, "watch": dict(watch), **more}
            self._job.journal.record(replace(self._row, outcome=outcome, guard=guard, origin=self._restored.origin))


def _watch(restored: Restored, config: CPSRConfig, group: Group) -> Watch | None:
    if not restored.beginning.predicted or restored.scalars is None:
        return None
    baseline = _mean_over_ranks(restored.scalars.recent_losses, group)
    if not any(math.isfinite(loss) for loss in baseline):
        return None  # nothing to compare with
    return Watch(baseline, config.restart.loss_tolerance_nats + NOISE_NATS)


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
