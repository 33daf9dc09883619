"""The guard: a veto over predicted states. It never optimises them (an optimiser would pick averages)."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from cpsr.predictor.displacement import Displacements

__all__ = ["LENGTHS", "Guard", "GuardDecision"]

# A vetoed displacement is tried again at half and at a quarter of its length: lines bend, and their beginnings are
# sound where their ends are not. Evaluating a few batches costs nothing against recomputing.
LENGTHS = (1.0, 0.5, 0.25)


@dataclass(frozen=True)
class GuardDecision:
    """One check of a predicted state.

    Attributes:
        check: `finite` or `loss`.
        accepted: False is a veto.
        reason: one sentence for the user.
        numbers: the compared numbers, for the journal (plain data, not necessarily finite).
    """

    check: str
    accepted: bool
    reason: str
    numbers: dict[str, Any] = field(default_factory=dict)


class Guard:
    """Limits and checks on a predicted state before training goes on from it.

    Args:
        loss_tolerance_nats: a predicted state whose loss exceeds the checkpoint's by more is vetoed.
        displacement_limit: largest step of an operator, in multiples of the path that its history took.

    Raises:
        ValueError: a limit that is not a positive, finite number.
    """

    def __init__(self, loss_tolerance_nats: float = 0.3, displacement_limit: float = 1.0) -> None:
        for name, value in (("loss_tolerance_nats", loss_tolerance_nats), ("displacement_limit", displacement_limit)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: expected a positive, finite number")
        self._loss_tolerance_nats = loss_tolerance_nats
        self._displacement_limit = displacement_limit

    def limit(self, displacements: Displacements) -> torch.Tensor:
        """Scale in (0, 1] per operator that keeps its step within the limit; `(n,)` float64.

        The allowed norm is `displacement_limit` times the path: the summed norms between consecutive snapshots that
        the prediction rests on. How far a line is well followed depends on its window and hardly on the horizon, so
        the horizon is no measure here. 1 where an operator's predicted step is zero or not finite (the finite check
        speaks there); the smallest positive scale where its history never moved and the prediction does.
        """
        path = displacements.history_squared.sqrt().sum(dim=1)
        tiny = torch.finfo(torch.float64).tiny
        allowed = self._displacement_limit * path
        predicted = displacements.predicted_squared.sqrt()
        scale = (allowed / predicted.clamp(min=tiny)).clamp(min=tiny, max=1.0)
        judged = (predicted > 0) & torch.isfinite(predicted)
        return torch.where(judged, scale, torch.ones_like(scale))

    def finite(self, displacements: Displacements) -> GuardDecision:
        """Whether every predicted value is finite (after the counts were summed over the ranks)."""
        counts = displacements.not_finite
        names = [name for name, count in zip(displacements.operators, counts.tolist(), strict=True) if count > 0]
        numbers = {"not_finite": int(counts.sum()), "operators": names[:8]}
        if not names:
            return GuardDecision("finite", True, "every predicted value is finite", numbers)
        reason = f"{numbers['not_finite']} predicted values are NaN or infinite, first in '{names[0]}'"
        return GuardDecision("finite", False, reason, numbers)

    def veto(
        self,
        loss_checkpoint: float,
        loss_predicted: float,
        tolerance_nats: float | None = None,
        what: str = "predicted state",
    ) -> GuardDecision:
        """Compare losses on the same few batches at the checkpoint and at the predicted state.

        A predicted loss within `tolerance_nats` (None: the guard's own) above the checkpoint's is accepted; good
        predictions are 0.05 to 0.1 nats up. A loss that is NaN or infinite, on either side, is a veto: there is
        nothing to compare with.
        """
        tolerance = self._loss_tolerance_nats if tolerance_nats is None else tolerance_nats
        excess = loss_predicted - loss_checkpoint
        numbers = {
            "loss_checkpoint": loss_checkpoint,
            "loss_predicted": loss_predicted,
            "excess_nats": excess,
            "tolerance_nats": tolerance,
        }
        for where, loss in ((what, loss_predicted), ("checkpoint", loss_checkpoint)):
            if not math.isfinite(loss):
                return GuardDecision("loss", False, f"vetoed: the loss at the {where} is {loss}", numbers)
        compared = f"{what} {loss_predicted:.4f}, checkpoint {loss_checkpoint:.4f}: {excess:+.4f} nats"
        if excess > tolerance:
            return GuardDecision("loss", False, f"vetoed: {compared}, tolerance {tolerance:g}", numbers)
        return GuardDecision("loss", True, f"accepted: {compared}, tolerance {tolerance:g}", numbers)
