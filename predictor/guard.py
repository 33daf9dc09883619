"""The guard: limits and checks on a predicted state; it never optimises it (an optimiser would pick averages)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cpsr.predictor.checkpoint_series import newest_used
from cpsr.predictor.protocol import STALE_METHOD, Forecast, History
from cpsr.predictor.weight_pieces import read_piece

__all__ = ["Displacements", "Guard", "GuardDecision", "attempts", "measure", "of_length", "shorten"]

# A vetoed displacement is tried again at half and at a quarter of its length: lines bend, and their beginnings are
# sound where their ends are not. Evaluating a few batches costs nothing against recomputing.
LENGTHS = (1.0, 0.5, 0.25, 0.0)
# A sum above it holds no square that was lost below float32's smallest number and would count.
SMALLEST_SQUARE = 1e-25


@dataclass(frozen=True)
class Displacements:
    """Squared norms of displacements by operator, float64 on the CPU.

    Where ranks own slices of the same operators, sum all three over the ranks (`all_reduce`, all with the same
    `operators`).

    Attributes:
        operators: names of the rows, `n` of them.
        predicted_squared: predicted minus newest used snapshot, `(n,)`.
        history_squared: between consecutive used snapshots, `(n, entries - 1)`, zero where there is none.
        not_finite: predicted values that are NaN or infinite, `(n,)`, as float64 counts.
    """

    operators: tuple[str, ...]
    predicted_squared: torch.Tensor
    history_squared: torch.Tensor
    not_finite: torch.Tensor


def measure(
    history: History,
    forecast: Forecast,
    pieces: Iterable[tuple[str, int, torch.Tensor]],
    operators: Sequence[str] | None = None,
) -> Displacements:
    """Norms of what a forecast does, in one pass over the predicted pieces and the history beside them.

    Args:
        history: what was predicted from.
        forecast: a feasible forecast from it.
        pieces: what the predictor's `predict` streams for them.
        operators: rows of the result; the same on every rank where norms are summed over ranks. An operator that
            this rank does not own has zeros. None: the history's own.

    Raises:
        ValueError: a piece belongs to an operator that is not in `operators`.
    """
    names = tuple(history.operators if operators is None else operators)
    row_of = {name: place for place, name in enumerate(names)}
    for operator in history.operators:
        if operator not in row_of:
            raise ValueError(f"operator '{operator}' is missing in the list of operators to measure")
    zeros = torch.zeros(len(names), max(len(history.entries) - 1, 0), dtype=torch.float64, device="cpu")
    result = Displacements(names, zeros.new_zeros(len(names)), zeros, zeros.new_zeros(len(names)))
    for operator, start, values in pieces:
        place, stop = row_of[operator], start + values.numel()
        used = [position for position, value in enumerate(forecast.coefficients[operator]) if value != 0.0]
        older = read_piece(history, operator, used[0], start, stop)
        for gap, position in enumerate(used[1:]):
            newer = read_piece(history, operator, position, start, stop)
            result.history_squared[place, gap] += _squared(newer - older)
            older = newer
        moved_squared = _squared(values - older)
        result.predicted_squared[place] += moved_squared
        if not math.isfinite(moved_squared):  # NaN and infinity reach the norm: else none is there to be counted
            result.not_finite[place] += float(values.numel() - int(torch.isfinite(values).sum()))
    return result


def shorten(forecast: Forecast, scales: Mapping[str, float]) -> Forecast:
    """The forecast with each operator's displacement from its newest used snapshot multiplied by its scale."""
    rows = dict(forecast.coefficients)
    for operator, scale in scales.items():
        if operator in rows and scale != 1.0:
            row = [scale * value for value in rows[operator]]
            row[newest_used(rows[operator])] += 1.0 - scale
            rows[operator] = tuple(row)
    return replace(forecast, coefficients=rows)


def of_length(forecast: Forecast, length: float) -> Forecast:
    """The forecast with all of its displacement this much as long; its settings and its expected cost follow.

    Args:
        forecast: a feasible one.
        length: in [0, 1]; at 0 the checkpoint's weights are left, and only what skipping costs.
    """
    if length == 1.0:
        return forecast
    shorter = shorten(forecast, dict.fromkeys(forecast.coefficients, length))
    names = ("reach_iterations", "reach_time", "move_iterations")
    scaled = {name: forecast.settings[name] * length for name in names if name in forecast.settings}
    return replace(
        shorter,
        method=forecast.method if length else STALE_METHOD,
        settings={**forecast.settings, **scaled},
        expected_end_cost_iterations=forecast.expected_end_cost_iterations - (1.0 - length) * forecast.move_iterations,
    )


def attempts(forecast: Forecast, recomputed_iterations: float | None) -> Iterator[tuple[float, Forecast]]:
    """The forecast at its lengths, the longest first, in the order in which vetoes lead from one to the next.

    The last is the checkpoint's weights, where these certainly cost less than recomputing.

    Args:
        forecast: a feasible one.
        recomputed_iterations: a length is left out where it does not certainly cost less; None: only the last may be.
    """
    if forecast.method == STALE_METHOD:
        yield 1.0, forecast
        return
    for length in LENGTHS:
        tried = of_length(forecast, length)
        limit = recomputed_iterations
        if limit is None and length == 0.0:
            limit = float(forecast.settings.get("horizon_iterations", 0.0))
        if limit is None or tried.is_safe(limit):
            yield length, tried


def _squared(values: torch.Tensor) -> float:
    # `sum` adds in pairs, so that float32 loses nothing that counts, at twice the speed of a norm in float64. That is
    # for squares beyond float32's range.
    squared = float(values.square().sum())
    if SMALLEST_SQUARE < squared < math.inf:
        return squared
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


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

    Raises:
        ValueError: the tolerance is not a positive, finite number.
    """

    def __init__(self, loss_tolerance_nats: float = 0.3) -> None:
        if not 0 < loss_tolerance_nats < math.inf:
            raise ValueError(f"loss_tolerance_nats = {loss_tolerance_nats}: expected a positive, finite number")
        self._loss_tolerance_nats = loss_tolerance_nats

    def limit(self, displacements: Displacements) -> torch.Tensor:
        """Scale in (0, 1] per operator that keeps its step within the limit; `(n,)` float64.

        The allowed norm is the path of its history: the summed norms between consecutive snapshots that
        the prediction rests on. How far a line is well followed depends on its window and hardly on the horizon, so
        the horizon is no measure here. 1 where an operator's predicted step is zero or not finite (the finite check
        speaks there); the smallest positive scale where its history never moved and the prediction does.
        """
        allowed = displacements.history_squared.sqrt().sum(dim=1)
        tiny = torch.finfo(torch.float64).tiny
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

    def veto(self, loss_checkpoint: float, loss_predicted: float, what: str = "predicted state") -> GuardDecision:
        """Compare losses on the same few batches at the checkpoint and at the predicted state.

        A predicted loss within the guard's tolerance above the checkpoint's is accepted; good predictions are 0.05 to
        0.1 nats up. A loss that is NaN or infinite, on either side, is a veto: there is
        nothing to compare with.
        """
        tolerance = self._loss_tolerance_nats
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
