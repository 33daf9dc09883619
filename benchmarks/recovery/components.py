"""The full predictor with one component replaced, for the ablation: what settings alone cannot say."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from cpsr.predictor.line import LinePredictor, line_coefficients
from cpsr.predictor.protocol import Forecast, History, HistoryEntry, Target
from cpsr.predictor.series_predictor import Fit
from cpsr.predictor.vitp import VITPPredictor

__all__ = ["IterationTime", "ScaledSecant"]


class ScaledSecant(LinePredictor):
    """No denoising: the last two checkpoints' secant, as far as the line would be followed.

    It is not turned: a learned direction is one that was denoised.
    """

    name = "secant-scaled"

    def _fit(self, points: Sequence[HistoryEntry], target: Target) -> Fit:
        fit = super()._fit(points, target)
        last = [point.time for point in points[-2:]]
        if fit.obstacle is not None or last[0] == last[1]:
            return fit  # in the second case the learning rate was 0 between them: there is no secant
        row = line_coefficients(last, target.time, fit.settings["gain"], base=0.0)
        return replace(fit, row=(0.0,) * (len(points) - 2) + row, reads=None)


class IterationTime(VITPPredictor):
    """Iterations in place of the cumulative learning rate, wherever the full predictor speaks of time."""

    name = "iteration-time"

    def learn(self, history: History) -> Iterator[None]:
        """As the full predictor."""
        return super().learn(_ByIteration(history))

    def forecast(self, history: History, target: Target) -> Forecast:
        """As the full predictor."""
        return super().forecast(_ByIteration(history), replace(target, time=float(target.iteration)))


class _ByIteration:
    """A history whose times are its iterations (a `History`)."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.entries = tuple(replace(entry, time=float(entry.iteration)) for entry in history.entries)
        self.operators = history.operators

    def numel(self, operator: str) -> int:
        return self._history.numel(operator)

    def taken_at(self, operator: str, entry: int) -> int:
        return self._history.taken_at(operator, entry)

    def read(self, operator: str, entry: int, start: int, stop: int) -> torch.Tensor:
        return self._history.read(operator, entry, start, stop)
