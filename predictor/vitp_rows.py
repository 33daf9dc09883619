"""Rows of coefficients in a learned direction: the line's displacement, turned and as long as before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cpsr.predictor.line import line_coefficients
from cpsr.predictor.protocol import HistoryEntry, Target
from cpsr.predictor.series import Series, distinct_times
from cpsr.predictor.series_predictor import Fit
from cpsr.predictor.statistics import MAX_SNAPSHOTS, merged
from cpsr.predictor.vitp_network import MIN_SNAPSHOTS, Geometry, corrections, squared_norms, undisturbed

__all__ = ["OperatorFit", "turned_rows"]

# Operators that pass the network together: bounds its memory at 2 MiB.
OPERATORS_AT_ONCE = 64
# Where a correction cancels more of the line's displacement than this leaves, stretching the rest to the old length
# would multiply its noise tenfold.
SHORTEST = 0.1


@dataclass(frozen=True)
class OperatorFit:
    """The line of one operator, whose direction the network is asked for.

    Attributes:
        series: its snapshots.
        fit: its row over them.
        window: places of the snapshots that the line is fitted over.
        held_in: iterations of the history's entries that the snapshots are read from.
        factor: how far this operator follows the line, over the model's reach.
    """

    series: Series
    fit: Fit
    window: tuple[int, ...]
    held_in: frozenset[int]
    factor: float

    @property
    def points(self) -> tuple[HistoryEntry, ...]:
        """When the snapshots of the window were taken."""
        return tuple(self.series.points[place] for place in self.window)

    @property
    def gain(self) -> float:
        """How far the whole model follows the line, in horizons."""
        return float(self.fit.settings["gain"])


def turned_rows(
    asked: Mapping[str, OperatorFit], products: Mapping[str, torch.Tensor], parameters: torch.Tensor, target: Target
) -> dict[str, tuple[float, ...]]:
    """Rows over their own snapshots of those operators that the network can turn."""
    groups: dict[tuple[tuple[HistoryEntry, ...], float], list[str]] = {}
    for operator, one in asked.items():
        groups.setdefault((one.points, one.gain), []).append(operator)
    rows: dict[str, tuple[float, ...]] = {}
    for (points, gain), operators in groups.items():
        places = distinct_times(points, range(len(points)))[-MAX_SNAPSHOTS:]
        if len(places) < MIN_SNAPSHOTS:
            continue
        for start in range(0, len(operators), OPERATORS_AT_ONCE):
            some = operators[start : start + OPERATORS_AT_ONCE]
            stacked = torch.stack([products[operator] for operator in some])
            turned = _corrections(points, places, stacked, parameters, target, gain)
            for operator, correction, matrix in zip(some, turned, stacked, strict=True):
                row = _turned(asked[operator], correction, matrix, target)
                if row is not None:
                    rows[operator] = row
    return rows


def _corrections(
    points: Sequence[HistoryEntry],
    places: Sequence[int],
    products: torch.Tensor,
    parameters: torch.Tensor,
    target: Target,
    gain: float,
) -> torch.Tensor:
    """The network's corrections over `points`, against a line of norm 1, float64; 0 beside `places`."""
    seen = [points[place] for place in places]
    middle = seen[-1].time + 0.5 * gain * (target.time - seen[-1].time)  # a displacement is the motion half way
    small = merged(products, places)
    scale = small.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    with undisturbed(), torch.no_grad():
        found = corrections(parameters, Geometry.of(seen, middle), (small / scale[:, None, None]).float()).double()
    full = torch.zeros(len(products), len(points), dtype=torch.float64, device="cpu")
    full[:, list(places)] = found - found.mean(dim=1, keepdim=True)  # what float32 has left of the sum
    return full


def _turned(
    asked: OperatorFit, correction: torch.Tensor, products: torch.Tensor, target: Target
) -> tuple[float, ...] | None:
    """The line's row with its displacement turned and as long as before; None where there is nothing to turn."""
    times = [point.time for point in asked.points]
    line = torch.tensor(line_coefficients(times, target.time, asked.gain, base=0.0), dtype=torch.float64, device="cpu")
    line[-1] -= 1.0
    displacement = line + line.norm() * correction
    pair = squared_norms(torch.stack([line, displacement]), products.expand(2, -1, -1)).clamp_min(0.0).sqrt()
    before, after = pair.tolist()
    if not (0.0 < before < float("inf") and SHORTEST * before < after < float("inf")):
        return None
    row = torch.tensor(asked.fit.row, dtype=torch.float64, device="cpu")
    row[list(asked.window)] += asked.factor * (displacement * (before / after) - line)
    return tuple(row.tolist())
