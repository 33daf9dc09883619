"""The first iterations after a predicted restart, watched by all ranks together."""

import math

import torch

from cpsr.config import GuardConfig
from cpsr.group import Group
from cpsr.losses import LossRecorder
from cpsr.predictor.watch import Watch, WatchDecision
from cpsr.restore import Restored

__all__ = ["RecoveryWatch", "start_watch"]


class RecoveryWatch:
    """Compares the training loss, averaged over the ranks that see one, with its level before the failure."""

    def __init__(self, watch: Watch, group: Group, losses: LossRecorder) -> None:
        self._watch = watch
        self._group = group
        self._losses = losses

    def observe(self, iteration: int) -> WatchDecision | None:
        """Judge the iteration that has just ended; a collective, the same decision on every rank.

        Returns:
            None where no rank saw a loss.
        """
        loss = self._losses.latest()
        seen = torch.tensor([0.0 if loss is None else loss, float(loss is not None)], dtype=torch.float64)
        total, count = self._group.reduce(seen).tolist()
        return self._watch.observe(iteration, total / count) if count else None


def start_watch(restored: Restored, config: GuardConfig, group: Group, losses: LossRecorder) -> RecoveryWatch | None:
    """Begin a watch; a collective. None where there is nothing to watch, or no loss to compare with."""
    if not restored.predicted or config.watch_iterations == 0 or restored.scalars is None:
        return None
    baseline = _mean_over_ranks(restored.scalars.recent_losses, group)
    if not any(math.isfinite(loss) for loss in baseline):
        return None  # nothing to compare with
    return RecoveryWatch(Watch(baseline, config.watch_iterations, config.watch_tolerance_nats), group, losses)


def _mean_over_ranks(losses: list[float], group: Group) -> list[float]:
    """Mean loss of each recent iteration over the ranks that saw it; empty where none did."""
    lengths = [length for length in group.gather(len(losses)) if length]
    if not lengths:
        return []
    length = min(lengths)
    values = torch.tensor(losses[-length:] if losses else [0.0] * length, dtype=torch.float64)
    mean: list[float] = (group.reduce(values) / len(lengths)).tolist()
    return mean
