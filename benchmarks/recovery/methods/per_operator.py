"""The line with a reach for each operator, two ways: by what the operator does, and by how straight its path is."""

from abc import abstractmethod
from dataclasses import replace

from cpsr.predictor.gram import gram
from cpsr.predictor.line import LinePredictor
from cpsr.predictor.protocol import History, Target
from cpsr.predictor.series import Series
from cpsr.predictor.series_predictor import Fit, newest_row
from cpsr.predictor.straightness import path_positions, straightness

__all__ = ["LineByStraightness", "LineOfReaders"]

# Embeddings of tokens, and what reads the residual stream, as this repository's GPT names them.
READERS = ("token.", ".qkv.weight", ".mlp.0.weight")
LONGEST = 2.0  # reaches of the whole model's


class _LinePerOperator(LinePredictor):
    """The line whose displacement is stretched by a factor for each operator."""

    @abstractmethod
    def _factor(self, history: History, operator: str) -> float:
        """Reach of the operator, over that of the whole model."""

    def _operator_row(self, history: History, operator: str, series: Series, fit: Fit, target: Target) -> Fit:
        factor = self._factor(history, operator)
        stay = newest_row(len(fit.row))
        return replace(fit, row=tuple(at + factor * (to - at) for at, to in zip(stay, fit.row, strict=True)))


class LineOfReaders(_LinePerOperator):
    """The line of embeddings and of matrices that read the residual stream; all others stay as they are."""

    name = "line-readers"

    def _factor(self, history: History, operator: str) -> float:
        return float(any(part in operator for part in READERS))


class LineByStraightness(_LinePerOperator):
    """The line followed farther where an operator's own path is straighter than the whole model's, at most twice."""

    name = "line-by-straightness"

    def _factor(self, history: History, operator: str) -> float:
        own = straightness(gram(history, operator, path_positions(history, range(len(history.entries)))))
        return min(max(own / self._straightness, 0.0), LONGEST) if self._straightness > 0.0 else 1.0
