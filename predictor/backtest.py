"""Backtests: the newest checkpoint that was learned, predicted from those before it, and how far off that was.

Every checkpoint and every prediction is a row over the same snapshots. So the squared error of the weights follows from
the products that were learned, and no weights are read.

Source: CPSR, Eq. 9.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cpsr.predictor.line import LinePredictor
from cpsr.predictor.network import inner, undisturbed
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.predictor.statistics import OperatorMotion

__all__ = ["HORIZON_ITERATIONS", "backtests"]

# Errors are compared at this horizon: the nearest ones below and above that the checkpoints allow are tested.
HORIZON_ITERATIONS = 100
# The largest operators, which hold most weights: one forecast of so many takes a millisecond or two.
OPERATORS_MAX = 16


class _LearnedHistory:
    """The oldest `count` of the snapshots that were learned, as a history without weights: products are known."""

    def __init__(self, motions: Mapping[str, OperatorMotion], count: int) -> None:
        self._motions = motions
        self.operators: Sequence[str] = tuple(motions)
        self.entries: Sequence[HistoryEntry] = next(iter(motions.values())).points[:count]

    def numel(self, operator: str) -> int:
        return self._motions[operator].numel

    def taken_at(self, operator: str, entry: int) -> int:
        return self.entries[entry].iteration  # only whole snapshots are learned

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        raise NotImplementedError(f"the weights of {operator} are not kept")


def backtests(predictor: LinePredictor, operators: Mapping[str, OperatorMotion]) -> Iterator[dict[str, Any]]:
    """Predict the newest snapshot from those some 100 iterations before; each result is one piece of work.

    A result has the horizon (`horizon_iterations`) and the mean squared error of the weights (`mean_square_error`).

    Args:
        predictor: asks no other rank, and knows the products of these operators; it may change.
        operators: what was learned, with the same snapshots.
    """
    names = heapq.nlargest(OPERATORS_MAX, operators, key=lambda name: operators[name].numel)
    motions = {name: operators[name] for name in names}
    points = next((motion.points for motion in motions.values()), ())
    if not points:
        return
    target = Target(points[-1].iteration, points[-1].time, max(point.learning_rate for point in points))
    seen = [count for count in range(1, len(points)) if predictor.usable_windows(points[:count], target)[0]]
    horizons = {target.iteration - points[count - 1].iteration: count for count in seen}
    shorter = [horizon for horizon in horizons if horizon <= HORIZON_ITERATIONS]
    longer = [horizon for horizon in horizons if horizon >= HORIZON_ITERATIONS]
    products = torch.stack([motion.products for motion in motions.values()])
    for horizon in sorted({*sorted(shorter)[-1:], *sorted(longer)[:1]}):
        count = horizons[horizon]
        forecast = predictor.forecast(_LearnedHistory(motions, count), target)
        coefficients = [forecast.coefficients[name] for name in motions]
        rows = torch.zeros(len(motions), len(points), dtype=torch.float64, device="cpu")
        rows[:, :count] = torch.tensor(coefficients, dtype=torch.float64, device="cpu")
        rows[:, -1] -= 1.0  # from the newest snapshot
        with undisturbed(), torch.no_grad():
            squared = float(inner(rows, products, rows).sum())
        error = squared / sum(motion.numel for motion in motions.values())
        yield {"horizon_iterations": horizon, "mean_square_error": error}
