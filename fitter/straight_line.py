"""The straight line of least squares through points, with the standard error of its slope."""

import math
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

__all__ = ["StraightLine"]


@dataclass(frozen=True)
class StraightLine:
    """`intercept + slope * place`.

    Attributes:
        slope: of the line.
        intercept: its value at 0.
        slope_error: standard error of the slope, of noise that is independent and equal for all points.
    """

    slope: float
    intercept: float
    slope_error: float

    @classmethod
    def through(cls, places: NDArray[numpy.float64], values: NDArray[numpy.float64]) -> "StraightLine":
        """Fit the line.

        Args:
            places: of the points, `(points,)`; at least three of them differ.
            values: there, `(points,)`.
        """
        middle, mean = float(places.mean()), float(values.mean())
        aside = places - middle
        spread = float(aside @ aside)
        slope = float(aside @ (values - mean)) / spread
        residuals = values - mean - slope * aside
        error = math.sqrt(float(residuals @ residuals) / (len(places) - 2) / spread)
        return cls(slope, mean - slope * middle, error)
